#pragma once
// Tensors that the ranks of a run make bin by bin, kept for a file.

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "apps/common/array_output.hpp"

namespace gyre {

/// Collects tensors [outer, tokens of a bin, inner] by name. In the file, bins follow one another
/// along the tokens.
class KeptTensors {
 public:
  /// Extents before and after the tokens. `of_ranks`: each rank has its own tensor; else all have
  /// the same.
  struct Form {
    h5::Shape outer = {}, inner = {};
    bool of_ranks = true;
  };
  template <class T>
  void add(const std::string& name, const Form& form, const std::vector<T>& values) {
    auto& tensor = std::get<Tensors<T>>(tensors_)[name];
    tensor.form = form;
    tensor.bins.push_back(values);
  }
  /// All tensors, [ranks, outer, tokens, inner] or [outer, tokens, inner], on rank 0. Collective.
  std::vector<NamedArray> arrays(Communicator& world) const;

 private:
  template <class T>
  struct Tensor {
    Form form;
    std::vector<std::vector<T>> bins;
  };
  template <class T>
  using Tensors = std::map<std::string, Tensor<T>>;
  template <class T>
  static NamedArray array_of(const std::string& name, const Tensor<T>& tensor, Communicator& world);

  std::tuple<Tensors<int32_t>, Tensors<int64_t>, Tensors<float>> tensors_;
};

}  // namespace gyre
