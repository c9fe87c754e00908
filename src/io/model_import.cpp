#include "io/model_import.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "io/model_features.hpp"
#include "io/model_file.hpp"
#include "io/rope_keys.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace {

constexpr int64_t block_floats = int64_t{1} << 24;

void create(const Checkpoint& checkpoint, const std::string& path, const Provenance& provenance) {
  const ModelConfig& c = checkpoint.config;
  h5::File file = h5::File::create(path);
  write_schema(file, model_schema, provenance);
  file.create_group("/model");
  for (const auto& [name, value] : std::array<std::pair<const char*, int64_t>, 8>{
           {{"vocab_size", c.vocab_size},
            {"vocab_padded", c.vocab_padded},
            {"hidden_size", c.hidden_size},
            {"num_hidden_layers", c.num_hidden_layers},
            {"num_attention_heads", c.num_attention_heads},
            {"num_key_value_heads", c.num_key_value_heads},
            {"head_dim", c.head_dim},
            {"intermediate_size", c.intermediate_size}}})
    file.write_attribute("/model", name, value);
  file.write_attribute("/model", "rope_theta", c.rope_theta);
  file.write_attribute("/model", "rms_norm_eps", c.rms_norm_eps);
  if (c.rotary_dim != 0) file.write_attribute("/model", "rotary_dim", c.rotary_dim);
  if (c.rope_scaling.type != RopeType::plain)
    file.write_attribute("/model", "rope_scaling", rope_json(c.rope_scaling));
  for (const auto& [name, value] : feature_values(c)) {
    if (const auto* whole = std::get_if<int64_t>(&value))
      file.write_attribute("/model", name, *whole);
    else
      file.write_attribute("/model", name, std::get<std::string>(value));
  }
  if (!checkpoint.tokenizer.empty())
    file.write_attribute("/model", "tokenizer", checkpoint.tokenizer);
  for (const auto& [name, shape] : model_tensors(c))
    file.create_dataset("/model/" + name, DType::f32, shape, h5::Checksum::fletcher32);
  file.close();
}

/// Reads a tensor of the checkpoint in the form of its dataset in the model file.
class Source {
 public:
  Source(const Checkpoint& checkpoint, const std::string& name, const h5::Shape& shape)
      : tensor_(checkpoint.tensors.at(name == "head" && checkpoint.tied_head ? "embed" : name)),
        name_(name),
        transposed_(shape.size() == 2 && name != "embed"),
        stored_rows_(tensor_.shape.size() == 2 ? tensor_.shape[0] : 1),
        stored_columns_(tensor_.shape.back()),
        columns_(shape.back()) {
    const bool rotary = name.ends_with("/wq") || name.ends_with("/wk") || name.ends_with("/bq") ||
                        name.ends_with("/bk");
    if (rotary && checkpoint.interleaved_rotary) {
      head_dim_ = checkpoint.config.head_dim;
      rotary_dim_ = checkpoint.config.rotary_width();
    }
  }

  /// Number of values that are decoded together; blocks of rows begin at multiples of it.
  int64_t block_values() const { return block_of(tensor_.encoding).values; }
  /// out [count, columns] <- rows [begin, begin + count) of the dataset; elements that the tensor
  /// lacks (padding of the vocabulary) become 0.
  void read(int64_t begin, int64_t count, std::span<float> out) const {
    std::fill(out.begin(), out.end(), 0.0F);
    if (transposed_)
      read_transposed(begin, count, out);
    else if (head_dim_ > 0)
      read_bias(out);
    else
      for (int64_t r = begin; r < std::min(begin + count, stored_rows_); ++r)
        decode(r, 0, out.subspan((r - begin) * columns_, columns_));
  }

 private:
  void decode(int64_t row, int64_t column, std::span<float> out) const {
    decode_weights(tensor_.encoding, tensor_.data, row * stored_columns_ + column, out);
    const auto bad =
        std::find_if(out.begin(), out.end(), [](float x) { return !std::isfinite(x); });
    if (bad != out.end())
      throw_usage("'{}': the tensor for '{}' has {} at [{}, {}]; weights must be finite",
                  tensor_.file, name_, *bad, row, column + (bad - out.begin()));
  }
  /// Column of the dataset that a stored row becomes.
  int64_t place_of(int64_t row) const {
    const int64_t i = head_dim_ == 0 ? 0 : row % head_dim_;
    return i < rotary_dim_ ? row - i + i % 2 * (rotary_dim_ / 2) + i / 2 : row;
  }
  void read_transposed(int64_t begin, int64_t count, std::span<float> out) const {
    constexpr int64_t together = 16;  // stored rows per turn: one cache line of each row of `out`
    std::vector<float> rows(together * count);
    for (int64_t first = 0; first < stored_rows_; first += together) {
      const int64_t some = std::min(together, stored_rows_ - first);
      for (int64_t r = 0; r < some; ++r)
        decode(first + r, begin, std::span(rows).subspan(r * count, count));
      for (int64_t i = 0; i < count; ++i)
        for (int64_t r = 0; r < some; ++r)
          out[i * columns_ + place_of(first + r)] = rows[r * count + i];
    }
  }

  void read_bias(std::span<float> out) const {
    std::vector<float> values(out.size());
    decode(0, 0, values);
    for (int64_t i = 0; i < columns_; ++i) out[place_of(i)] = values[i];
  }

  const StoredTensor& tensor_;
  std::string name_;
  bool transposed_;
  int64_t stored_rows_, stored_columns_, columns_;
  int64_t head_dim_ = 0, rotary_dim_ = 0;
};

/// Fills a dataset; ranks take turns at its blocks of rows.
void fill(Communicator& comm, const h5::File& file, const std::string& name, const h5::Shape& shape,
          const Checkpoint& checkpoint) {
  const Source source(checkpoint, name, shape);
  const int64_t rows = shape.size() == 2 ? shape[0] : 1, columns = shape.back();
  const int64_t unit = source.block_values();
  const int64_t block = std::max(unit, block_floats / columns / unit * unit);
  const h5::Dataset dataset = file.dataset("/model/" + name);
  for (int64_t round = 0; round < rows; round += block * comm.size()) {
    const int64_t begin = std::min(rows, round + block * comm.rank());
    const int64_t count = std::min(block, rows - begin);
    Buffer<float> values;
    run_agreed(comm, "reading " + name, [&] {
      values = Buffer<float>(count * columns);
      if (count > 0) source.read(begin, count, values.span());
    });
    const h5::Slab slab = shape.size() == 2 ? h5::Slab{{begin, 0}, {count, columns}}
                                            : h5::Slab{{0}, {count * columns}};
    dataset.write<float>(std::span(&slab, 1), values.span());
  }
}

}  // namespace

void write_model(OutputFile& output, const Checkpoint& checkpoint, const Provenance& provenance) {
  Communicator& comm = output.comm();
  run_on_root(comm, "creating " + output.path(),
              [&] { create(checkpoint, output.temporary_path(), provenance); });
  h5::File file = h5::File::open_to_fill(comm, output.temporary_path());
  for (const auto& [name, shape] : model_tensors(checkpoint.config))
    fill(comm, file, name, shape, checkpoint);
  file.close();
}

}  // namespace gyre
