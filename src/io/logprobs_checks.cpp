#include "io/logprobs_checks.hpp"

#include <algorithm>
#include <cmath>

namespace gyre {

void check_kept(ConfigErrors& errors, const LogprobsFile& f) {
  if (f.kept_offsets.empty()) return;
  const size_t before = errors.messages().size();
  check_offsets(errors, kept_offsets_path, f.kept_offsets, std::ssize(f.kept_ids), kept_ids_path);
  if (errors.messages().size() > before) return;
  std::vector<int64_t> row_of_id(f.vocab_size, -1);
  for (int64_t t = 0; t < f.tokens(); ++t)
    for (int64_t i = f.kept_offsets[t]; i < f.kept_offsets[t + 1]; ++i) {
      const int32_t id = f.kept_ids[i];
      if (id < 0 || id >= f.vocab_size)
        return errors.add("{}[{}] is {}; ids are 0 to {}", kept_ids_path, i, id, f.vocab_size - 1);
      if (row_of_id[id] == t)
        return errors.add("{}[{}] is {}, which row {} has already", kept_ids_path, i, id, t);
      row_of_id[id] = t;
    }
}

void check_logprobs(ConfigErrors& errors, const char* path, const std::vector<float>& values) {
  const auto wrong = std::ranges::find_if_not(values, [](float x) { return x <= 0; });
  if (wrong != values.end())
    errors.add("{}[{}] is {}; a log-probability is at most 0", path, wrong - values.begin(),
               *wrong);
}

void check_gradients(ConfigErrors& errors, const char* path, const std::vector<float>& gradients,
                     int64_t width, const LogprobsFile& f) {
  constexpr double largest = 1e30F;
  for (int64_t i = 0; i < std::ssize(gradients); ++i) {
    const double t = f.temperatures.empty() ? f.temperature : f.temperatures[i / width];
    const double most = largest * std::min(1.0, t * t);
    if (std::abs(gradients[i]) <= most) continue;
    if (!std::isfinite(gradients[i]))
      return errors.add("{}[{}] is {}; it must be finite", path, i, gradients[i]);
    return errors.add("{}[{}] is {}; a gradient at a temperature of {:g} is from {:g} to {:g}",
                      path, i, gradients[i], t, -most, most);
  }
}

void check_largest(ConfigErrors& errors, const LogprobsFile& f) {
  if (!f.has_teacher_logprobs) return;
  std::vector<int64_t> row_of_id(f.vocab_size, -1);
  for (int64_t t = 0; t < f.tokens(); ++t) {
    const float* const z = f.logits.data() + t * f.columns;
    const int32_t* const ids = f.ids.data() + t * f.picks;
    int64_t least = 0;
    for (int64_t k = 0; k < f.picks; ++k) {
      if (row_of_id[ids[k]] == t)
        return errors.add("{}[{}, {}] is {}, which the row has already; {} is of different ids",
                          row_ids_path, t, k, ids[k], teacher_logprobs_path);
      row_of_id[ids[k]] = t;
      if (z[ids[k]] < z[ids[least]]) least = k;
    }
    for (int64_t v = 0; v < f.vocab_size; ++v)
      if (row_of_id[v] != t && z[v] > z[ids[least]])
        return errors.add(
            "{}[{}, {}] is {}, whose logit is {}; {} is of the student's {} largest, of which {}, "
            "with {}, is missing",
            row_ids_path, t, least, ids[least], z[ids[least]], teacher_logprobs_path, f.picks, v,
            z[v]);
  }
}

}  // namespace gyre
