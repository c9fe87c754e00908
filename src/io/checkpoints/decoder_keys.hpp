#pragma once
// Keys of Hugging Face configurations that ask for a decoder other than model/decoder.hpp.

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/model_config.hpp"
#include "io/h5.hpp"

namespace gyre {

/// Names of all keys that check_decoder_keys() knows.
std::vector<std::string> decoder_keys();

/// Adds an error for each key whose value, `value(key)`, asks for another decoder than that of
/// `config`. If `only_layers`, checks only keys that change the time of a layer. Lists and objects
/// are given as JSON texts.
void check_decoder_keys(ConfigErrors& errors, const ModelConfig& config, bool only_layers,
                        const std::function<h5::AttributeValue(const std::string&)>& value);

/// Adds an error for each of `ignored`, the values of --ignore-key, that is none of `names`, the
/// keys of a configuration, or one of `read`.
void check_ignored_keys(ConfigErrors& errors, const std::vector<std::string>& ignored,
                        const std::vector<std::string>& names, const std::set<std::string>& read);

}  // namespace gyre
