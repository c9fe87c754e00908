#pragma once
// Checks of the rows of /logprobs: ids that a sampler kept, a teacher's log-probabilities.

#include <vector>

#include "io/logprobs_file.hpp"

namespace gyre {

inline constexpr const char *kept_offsets_path = "/logprobs/sampling_mask_offsets",
                            *kept_ids_path = "/logprobs/sampling_mask_ids",
                            *row_ids_path = "/logprobs/ids",
                            *teacher_logprobs_path = "/logprobs/teacher_logprobs",
                            *teacher_target_path = "/logprobs/teacher_target_logprobs";

/// Adds an error for the first id that is outside the vocabulary, or twice in its row.
void check_kept(ConfigErrors& errors, const LogprobsFile& f);
/// Adds an error for the first log-probability that is NaN or above 0.
void check_logprobs(ConfigErrors& errors, const char* path, const std::vector<float>& values);
/// Adds an error for the first gradient of a value, of a row of `width` values, that is not finite or
/// so large that sums of its terms may leave f32: above 1e30, or 1e30 times the temperature squared.
void check_gradients(ConfigErrors& errors, const char* path, const std::vector<float>& gradients,
                     int64_t width, const LogprobsFile& f);
/// Adds an error for the first row in which the ids of a teacher's log-probabilities are not the
/// student's largest, each once; any of equal logits will do.
void check_largest(ConfigErrors& errors, const LogprobsFile& f);

}  // namespace gyre
