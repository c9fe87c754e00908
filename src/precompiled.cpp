// The headers of precompiled.hpp are compiled with this file.
