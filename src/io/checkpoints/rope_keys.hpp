#pragma once
// The rotary embedding in a configuration: 'rope_theta', 'rope_scaling' or 'rope_parameters',
// 'partial_rotary_factor' or 'rotary_dim', as in Hugging Face's config.json and in gyre/model.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/model_config.hpp"
#include "io/h5.hpp"

namespace gyre {

/// Names of all keys that read_rope() reads.
inline constexpr const char* rope_keys[] = {"rope_theta",      "rope_scaling",
                                            "rope_parameters", "partial_rotary_factor",
                                            "rotary_dim",      "max_position_embeddings"};

/// Sets rope_theta, rotary_dim and rope_scaling of `config` from `value(key)`, which gives objects
/// as JSON texts. The caller has set head_dim and the default of rope_theta. Adds an error for each
/// key, also inside an object, that is wrong, missing or not supported. `ignored`: keys to leave
/// alone ("rope_scaling.KEY"), for a caller that has an option for them; one that is read is an
/// error. `usual_share`: the share of a head's elements that rotate if no key gives one.
void read_rope(ConfigErrors& errors,
               const std::function<h5::AttributeValue(const std::string&)>& value,
               ModelConfig& config, const std::vector<std::string>* ignored = nullptr,
               std::optional<double> usual_share = {});

/// YaRN's factor of cos and sin: 0.1 · mscale · ln(factor) + 1, or 1 if factor <= 1.
double yarn_attention_factor(double factor, double mscale = 1);

/// 'rope_scaling' as JSON.
std::string rope_json(const RopeScaling& scaling);

/// Adds all errors of rope_theta and rope_scaling.
void check_rope(ConfigErrors& errors, const ModelConfig& config);

}  // namespace gyre
