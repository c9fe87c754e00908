#include "io/checkpoints/model_import.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <future>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "io/checkpoints/model_features.hpp"
#include "io/checkpoints/rope_keys.hpp"
#include "io/schemas/model_file.hpp"

namespace gyre {
namespace {

/// Stored rows that are transposed together: a cache line of 16-bit elements of the dataset.
constexpr int64_t together = 32;
/// Most rows and columns of a chunk of a transposed dataset, multiples of it.
constexpr int64_t chunk_rows = 512, chunk_columns = 1024;

/// Floats keep their type; values of blocks and sums with 1 need float32.
h5::Type type_of(const StoredTensor& tensor) {
  if (tensor.encoding == WeightEncoding::bf16 && !tensor.less_one) return h5::Type::bfloat16;
  const bool is_half = tensor.encoding == WeightEncoding::f16 && !tensor.less_one;
  return is_half ? h5::Type::float16 : h5::Type::f32;
}

/// Extent of parts that cover `extent`, almost equal, at most `most`.
int64_t even_part(int64_t extent, int64_t most) {
  return std::min(extent, round_up(ceil_div(extent, ceil_div(extent, most)), together));
}
h5::Shape chunk_of(const std::string& name, const h5::Shape& shape) {
  if (shape.size() == 1) return shape;
  if (name == "embed")
    return {std::clamp<int64_t>(chunk_rows * chunk_columns / shape[1], 1, shape[0]), shape[1]};
  return {even_part(shape[0], chunk_rows), even_part(shape[1], chunk_columns)};
}

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
  if (checkpoint.longest_text != 0)
    file.write_attribute("/model", "max_position_embeddings", checkpoint.longest_text);
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
    file.create_dataset("/model/" + name, h5::stored_type_of(type_of(checkpoint.tensors.at(name))),
                        shape, h5::Checksum::fletcher32, chunk_of(name, shape));
  file.close();
}

/// Bits of the elements in a word of 64 bits.
struct FloatBits {
  uint64_t sign;
  uint64_t lowest_of_exponent;
};
FloatBits bits_of(h5::Type type) {
  if (type == h5::Type::f32) return {0x8000'0000'8000'0000, 0x0080'0000'0080'0000};
  return {0x8000'8000'8000'8000,
          type == h5::Type::bfloat16 ? 0x0080'0080'0080'0080U : 0x0400'0400'0400'0400U};
}

/// Whether no exponent has all bits set: one bit more would carry into the place of the sign.
bool all_finite(const std::byte* values, int64_t bytes, FloatBits bits) {
  const uint64_t exponent = bits.sign - bits.lowest_of_exponent;
  uint64_t carries = 0, word = 0;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(sizeof(word)) <= bytes; i += sizeof(word)) {
    std::memcpy(&word, values + i, sizeof(word));
    carries |= (word & exponent) + bits.lowest_of_exponent;
  }
  word = 0;
  std::memcpy(&word, values + i, bytes - i);
  carries |= (word & exponent) + bits.lowest_of_exponent;
  return (carries & bits.sign) == 0;
}

/// to [4, stride] <- the transpose of four elements of 16 bits of each row, from `offset` on.
/// Strides and offsets are in bytes.
void transpose_square(const std::byte* const* rows, int64_t offset, std::byte* to, int64_t stride) {
  constexpr uint64_t even = 0x0000'ffff'0000'ffff, low = 0x0000'0000'ffff'ffff;
  uint64_t a, b, c, d;
  std::memcpy(&a, rows[0] + offset, sizeof(a));
  std::memcpy(&b, rows[1] + offset, sizeof(b));
  std::memcpy(&c, rows[2] + offset, sizeof(c));
  std::memcpy(&d, rows[3] + offset, sizeof(d));
  const uint64_t ab_even = (a & even) | (b & even) << 16, ab_odd = (a >> 16 & even) | (b & ~even),
                 cd_even = (c & even) | (d & even) << 16, cd_odd = (c >> 16 & even) | (d & ~even);
  a = (ab_even & low) | cd_even << 32;
  b = (ab_odd & low) | cd_odd << 32;
  c = ab_even >> 32 | (cd_even & ~low);
  d = ab_odd >> 32 | (cd_odd & ~low);
  std::memcpy(to, &a, sizeof(a));
  std::memcpy(to + stride, &b, sizeof(b));
  std::memcpy(to + 2 * stride, &c, sizeof(c));
  std::memcpy(to + 3 * stride, &d, sizeof(d));
}

/// Reads blocks of a tensor of the checkpoint in the form of its dataset in the model file: whole
/// chunks, one after another, each with its checksum.
class Source {
 public:
  Source(const Checkpoint& checkpoint, const std::string& name, const h5::Shape& shape)
      : tensor_(checkpoint.tensors.at(name)),
        name_(name),
        shape_(shape),
        chunk_(chunk_of(name, shape)),
        transposed_(shape.size() == 2 && name != "embed"),
        rows_(tensor_.shape.size() == 2 ? tensor_.place_of(tensor_.shape[0] - 1) + 1 : 1),
        columns_(tensor_.shape.back()) {
    const bool rotary = name.ends_with("/wq") || name.ends_with("/wk") || name.ends_with("/bq") ||
                        name.ends_with("/bk");
    if (rotary && checkpoint.interleaved_rotary) {
      head_dim_ = checkpoint.config.head_dim;
      rotary_dim_ = checkpoint.config.rotary_width();
    }
  }

  /// Blocks of the dataset in the order of the stored rows, which are columns of a transposed
  /// dataset and rows of others. A block is one chunk wide.
  std::vector<h5::Slab> blocks() const {
    if (shape_.size() == 1) return {{{0}, shape_}};
    const size_t along = transposed_ ? 1 : 0;
    std::vector<h5::Slab> blocks;
    for (int64_t begin = 0; begin < shape_[along]; begin += chunk_[along]) {
      blocks.push_back({{0, 0}, shape_});
      blocks.back().start[along] = begin;
      blocks.back().count[along] = std::min(chunk_[along], shape_[along] - begin);
    }
    return blocks;
  }
  /// Begins of a block's chunks.
  std::vector<h5::Shape> chunks_of(const h5::Slab& block) const {
    std::vector<h5::Shape> begins;
    for (int64_t row = 0; row < block.count[0]; row += chunk_[0]) {
      begins.push_back(block.start);
      begins.back()[0] += row;
    }
    return begins;
  }
  /// Bytes of a chunk with its checksum.
  int64_t chunk_bytes() const {
    return h5::elements_of(chunk_) * (is_wide() ? sizeof(float) : sizeof(uint16_t)) +
           h5::checksum_bytes;
  }
  /// Elements of the block that the tensor lacks (padding of the vocabulary), and elements of a
  /// chunk that the dataset lacks, become 0.
  void read(const h5::Slab& block, std::vector<std::byte>& out) const {
    const int64_t chunks = std::ssize(chunks_of(block));
    out.resize(chunks * chunk_bytes());
    if (h5::elements_of(block.count) < chunks * h5::elements_of(chunk_))
      std::ranges::fill(out, std::byte{0});
    is_wide() ? read_as<uint32_t>(block, out.data()) : read_as<uint16_t>(block, out.data());
    for (int64_t i = 0; i < chunks; ++i)
      h5::add_checksum(std::span(out).subspan(i * chunk_bytes(), chunk_bytes()));
  }

 private:
  bool is_wide() const { return type_of(tensor_) == h5::Type::f32; }
  template <class Word>
  void read_as(const h5::Slab& block, std::byte* out) const {
    const int64_t begin = block.start[transposed_ ? 1 : 0],
                  count = block.count[transposed_ ? 1 : 0];
    std::vector<Word> rows(columns_ * together);
    if (shape_.size() == 1) {
      const std::byte* values = read_rows(0, 1, rows);
      for (int64_t i = 0; i < columns_; ++i)
        std::memcpy(out + i * sizeof(Word), values + place_of(i) * sizeof(Word), sizeof(Word));
      return;
    }
    for (int64_t i = 0; i < count; i += together) {
      const int64_t most = std::min(together, count - i);
      if (transposed_)
        transpose(begin + i, most, rows, out + i * sizeof(Word));
      else
        std::memcpy(out + i * columns_ * sizeof(Word), read_rows(begin + i, most, rows),
                    most * columns_ * sizeof(Word));
    }
  }
  /// Fills columns 0 to `count` - 1 of the chunks at `out` with the columns of the dataset from
  /// `begin` on.
  template <class Word>
  void transpose(int64_t begin, int64_t count, std::vector<Word>& scratch, std::byte* out) const {
    const int64_t stride = chunk_[1] * sizeof(Word);
    const std::byte* rows[together];
    for (int64_t j = 0, run = 1; j < count; j += run) {
      run = 1;  // columns that follow one another as stored rows
      while (j + run < count && place_of(begin + j + run) == place_of(begin + j) + run) ++run;
      const std::byte* read = read_rows(place_of(begin + j), run, scratch, j);
      for (int64_t k = 0; k < run; ++k) rows[j + k] = read + k * columns_ * sizeof(Word);
    }
    const bool in_squares = sizeof(Word) == 2 && count % 4 == 0 && columns_ % 4 == 0;
    const int64_t side = in_squares ? 4 : 1;
    for (int64_t i = 0; i < columns_; i += side) {
      std::byte* to = out + i / chunk_[0] * chunk_bytes() + i % chunk_[0] * stride;
      for (int64_t j = 0; j < count; j += side)
        if (in_squares)
          transpose_square(&rows[j], i * sizeof(Word), to + j * sizeof(Word), stride);
        else
          std::memcpy(to + j * sizeof(Word), rows[j] + i * sizeof(Word), sizeof(Word));
    }
  }
  /// Stored row that a column of the dataset holds.
  int64_t place_of(int64_t column) const {
    if (tensor_.run > 0) return tensor_.place_of(column);
    const int64_t i = head_dim_ == 0 ? 0 : column % head_dim_, half = rotary_dim_ / 2;
    return i < rotary_dim_ ? column - i + i % half * 2 + i / half : column;
  }
  /// Reads `count` stored rows from `index` on into `rows`, from its row `slot` on, and returns
  /// their elements: finite, of the dataset's type, zeros behind the last row.
  template <class Word>
  const std::byte* read_rows(int64_t index, int64_t count, std::vector<Word>& rows,
                             int64_t slot = 0) const {
    const auto out = std::span(rows).subspan(slot * columns_, count * columns_);
    const int64_t stored = std::clamp<int64_t>(rows_ - index, 0, count) * columns_;
    std::ranges::fill(out.subspan(stored), Word{0});
    const EncodedBlock unit = block_of(tensor_.encoding);
    const int64_t begin = tensor_.offset + index * columns_ / unit.values * unit.bytes;
    const std::span<std::byte> values = std::as_writable_bytes(out.first(stored));
    if (unit.bytes == sizeof(Word) && unit.values == 1 && !tensor_.less_one) {
      tensor_.file->read(begin, values);
    } else if (stored > 0) {
      std::vector<std::byte> encoded(stored / unit.values * unit.bytes);
      tensor_.file->read(begin, encoded);
      std::vector<float> decoded(stored);
      decode_weights(tensor_.encoding, encoded.data(), 0, decoded);
      if (tensor_.less_one)
        for (float& x : decoded) x += 1;
      std::memcpy(values.data(), decoded.data(), values.size());
    }
    if (!all_finite(values.data(), std::ssize(values), bits_of(type_of(tensor_))))
      refuse(index, values);
    return values.data();
  }
  /// Throws the error that names the first value that is not finite, of rows from `first` on.
  [[noreturn]] void refuse(int64_t first, std::span<const std::byte> values) const {
    const WeightEncoding type = is_wide() ? WeightEncoding::f32 : tensor_.encoding;
    std::vector<float> decoded(std::ssize(values) / block_of(type).bytes);
    decode_weights(type, values.data(), 0, decoded);
    const auto at =
        std::find_if(decoded.begin(), decoded.end(), [](float x) { return !std::isfinite(x); }) -
        decoded.begin();
    throw_usage("'{}': the tensor for '{}' has {} at [{}, {}]; weights must be finite",
                tensor_.file->path(), name_, decoded[at], first + at / columns_, at % columns_);
  }

  const StoredTensor& tensor_;
  std::string name_;
  h5::Shape shape_, chunk_;
  bool transposed_;
  int64_t rows_, columns_;
  int64_t head_dim_ = 0, rotary_dim_ = 0;
};

/// Reads the blocks of all tensors in order, one ahead of the caller in a thread, which makes no
/// calls of HDF5.
class BlockReader {
 public:
  void add(const Source& source) {
    for (const h5::Slab& block : source.blocks()) waiting_.push_back({&source, block});
  }
  /// The next block; the one before it becomes invalid.
  std::span<const std::byte> next() {
    if (!reading_.valid()) start();
    reading_.get();
    std::swap(current_, ahead_);
    start();
    return current_;
  }

 private:
  void start() {
    if (waiting_.empty()) return;
    reading_ = std::async(std::launch::async, [this, block = waiting_.front()] {
      block.source->read(block.slab, ahead_);
    });
    waiting_.pop_front();
  }

  struct Block {
    const Source* source;
    h5::Slab slab;
  };
  std::deque<Block> waiting_;
  std::vector<std::byte> current_, ahead_;
  std::future<void> reading_;  // last: destroyed, and so awaited, first
};

}  // namespace

void write_model(OutputFile& output, const Checkpoint& checkpoint, const Provenance& provenance) {
  Communicator& comm = output.comm();
  std::optional<h5::File> file;
  std::deque<Source> sources;
  BlockReader reader;
  run_on_root(comm, "creating " + output.path(), [&] {
    create(checkpoint, output.temporary_path(), provenance);
    file = h5::File::open_to_fill(output.temporary_path());
    for (const auto& [name, shape] : model_tensors(checkpoint.config))
      reader.add(sources.emplace_back(checkpoint, name, shape));
  });
  size_t index = 0;
  for (const auto& [name, shape] : model_tensors(checkpoint.config)) {
    run_on_root(comm, "writing " + name, [&] {
      const h5::Dataset dataset = file->dataset("/model/" + name);
      const Source& source = sources[index];
      for (const h5::Slab& block : source.blocks()) {
        std::span<const std::byte> bytes = reader.next();
        for (const h5::Shape& chunk : source.chunks_of(block)) {
          dataset.write_chunk(chunk, bytes.first(source.chunk_bytes()));
          bytes = bytes.subspan(source.chunk_bytes());
        }
      }
    });
    ++index;
  }
  run_on_root(comm, "closing " + output.path(), [&] { file->close(); });
}

}  // namespace gyre
