raise ImportError("a test hides it")
