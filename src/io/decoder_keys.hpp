#pragma once
// Keys of Hugging Face's configurations that ask for another decoder than model/decoder.hpp.

#include <functional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/model_config.hpp"
#include "io/h5.hpp"

namespace gyre {

/// Names of all keys that check_decoder_keys() knows.
std::vector<std::string> decoder_keys();

/// Adds an error for each key whose value, `value(key)`, makes other layers than those of `config`:
/// with `only_layers`, layers that differ in what they take; else, in what they compute. Lists and
/// objects are texts in JSON.
void check_decoder_keys(ConfigErrors& errors, const ModelConfig& config, bool only_layers,
                        const std::function<h5::AttributeValue(const std::string&)>& value);

}  // namespace gyre
