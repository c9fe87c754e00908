#pragma once
// The tokenizer of a Hugging Face model, tokenizer.json.

#include <string>

namespace gyre {

/// Name of the tokenizer: "sha256:" and the digest of its tokens in the order of their ids, each
/// after its length in 8 bytes; an id without a token counts as an empty one. So a file that was
/// saved again, with other blanks, orders or defaults, has the same name, and a GGUF file with the
/// same tokens too. Throws a usage error that names the file if it has no tokens, or a token whose
/// id is no whole number below 2^24.
std::string tokenizer_name(const std::string& path);

}  // namespace gyre
