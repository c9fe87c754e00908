#include "apps/shard/kept_tensors.hpp"

namespace gyre {

template <class T>
NamedArray KeptTensors::array_of(const std::string& name, const Tensor<T>& tensor,
                                 Communicator& world) {
  const int64_t planes = h5::elements_of(tensor.form.outer);
  std::vector<T> joined;
  int64_t size = 0;
  for (int64_t p = 0; p < planes; ++p)
    for (const std::vector<T>& bin : tensor.bins) {
      const int64_t plane = std::ssize(bin) / planes;
      joined.insert(joined.end(), bin.begin() + p * plane, bin.begin() + (p + 1) * plane);
      size += p == 0 ? plane : 0;
    }
  h5::Shape shape = tensor.form.outer;
  shape.push_back(size / h5::elements_of(tensor.form.inner));
  shape.insert(shape.end(), tensor.form.inner.begin(), tensor.form.inner.end());
  if (!tensor.form.of_ranks) return {name, shape, joined};
  shape.insert(shape.begin(), world.size());
  return {name, shape, rows_on_root(world, joined, world.size())};
}

std::vector<NamedArray> KeptTensors::arrays(Communicator& world) const {
  std::vector<NamedArray> arrays;
  std::apply(
      [&](const auto&... of_type) {
        const auto add = [&](const auto& tensors) {
          for (const auto& [name, tensor] : tensors)
            arrays.push_back(array_of(name, tensor, world));
        };
        (add(of_type), ...);
      },
      tensors_);
  return arrays;
}

}  // namespace gyre
