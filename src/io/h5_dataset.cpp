#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <new>
#include <numeric>

#include "comm/agree.hpp"
#include "comm/collective.hpp"
#include "core/bf16.hpp"
#include "core/error.hpp"
#include "core/f16.hpp"
#include "core/index.hpp"
#include "io/h5_support.hpp"
#include "io/trust/reading.hpp"

namespace gyre::h5 {
namespace {

using Extents = std::vector<hsize_t>;

Extents to_extents(const Shape& shape) {
  return {shape.begin(), shape.end()};
}

/// Cuts slabs by rows into rounds of at most `limit` elements (and at least one row) each.
std::vector<std::vector<Slab>> cut_into_rounds(std::span<const Slab> slabs, int64_t limit) {
  std::vector<std::vector<Slab>> rounds;
  int64_t room = 0;
  for (const Slab& slab : slabs) {
    const int64_t total = elements_of(slab.count);
    if (total == 0) continue;
    if (slab.count.empty()) return {{slab}};  // a scalar
    const int64_t row = total / slab.count[0];
    for (int64_t done = 0; done < slab.count[0];) {
      if (room < row) {
        rounds.emplace_back();
        room = std::max(limit, row);
      }
      Slab part = slab;
      part.start[0] += done;
      part.count[0] = std::min(slab.count[0] - done, room / row);
      done += part.count[0];
      room -= part.count[0] * row;
      rounds.back().push_back(std::move(part));
    }
  }
  return rounds;
}

int64_t elements_of_all(std::span<const Slab> slabs) {
  int64_t total = 0;
  for (const Slab& slab : slabs) total += h5::elements_of(slab.count);
  return total;
}

/// The file's dataspace with the union of `slabs` selected.
Handle select(hid_t dataset, std::span<const Slab> slabs, const std::string& where) {
  Handle space(H5Dget_space(dataset), H5Sclose);
  if (elements_of_all(slabs) == 0) {
    detail::check(H5Sselect_none(space.get()), "select nothing in " + where);
    return space;
  }
  if (slabs[0].count.empty()) return space;  // a scalar: all of it
  H5S_seloper_t how = H5S_SELECT_SET;
  for (const Slab& slab : slabs) {
    const Extents start = to_extents(slab.start), count = to_extents(slab.count);
    detail::check(
        H5Sselect_hyperslab(space.get(), how, start.data(), nullptr, count.data(), nullptr),
        fmt::format("select {} from {} in {}", to_string(slab.count), to_string(slab.start),
                    where));
    how = H5S_SELECT_OR;
  }
  return space;
}

Handle collective_transfer() {
  Handle list(H5Pcreate(H5P_DATASET_XFER), H5Pclose);
  detail::check(H5Pset_dxpl_mpio(list.get(), H5FD_MPIO_COLLECTIVE),
                "ask for a collective transfer");
  return list;
}

/// Runs `work` directly, or through run_agreed if there is a communicator.
void run(Communicator* comm, const std::string& what, const std::function<void()>& work) {
  if (comm == nullptr) return work();
  run_agreed(*comm, what, work);
}
/// Calls HDF5 directly, or in step with the other ranks of a communicator.
void in_step(const Communicator* comm, const std::function<void()>& call) {
  if (comm == nullptr) return call();
  run_in_step(*comm, call);
}

}  // namespace

int64_t elements_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::string to_string(const Shape& shape) {
  std::string text;
  for (int64_t extent : shape)
    text += (text.empty() ? "" : ", ") + (extent < 0 ? "any" : std::to_string(extent));
  return "[" + text + "]";
}

std::string_view name_of(Type type) {
  switch (type) {
    case Type::f32:
      return "float32";
    case Type::f64:
      return "float64";
    case Type::i32:
      return "int32";
    case Type::i64:
      return "int64";
    case Type::float16:
      return "float16";
    case Type::bfloat16:
      return "bfloat16";
    case Type::integer:
      return "another integer type";
    case Type::real:
      return "another real type";
    case Type::enumeration:
      return "an enumeration";
    case Type::text:
      return "text";
    case Type::other:
      return "a type that is not read";
  }
  return "?";
}

Dataset::~Dataset() {
  if (!id_.valid()) return;
  const Reading scope("closing " + path_ + " of " + file_, file_);
  id_.reset();
}

std::string Dataset::transfer_round(bool writing, hid_t type, std::span<const Slab> slabs,
                                    void* data) const {
  const std::string where = fmt::format("dataset '{}' of '{}'", path_, file_);
  const Handle file_space = select(id_.get(), slabs, where);
  const hsize_t count = elements_of_all(slabs);
  // If the shapes in memory and file differ, HDF5 looks up the chunk of every single element.
  const Extents shape = slabs.size() == 1 ? to_extents(slabs[0].count) : Extents{count};
  const Handle memory_space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr),
                            H5Sclose);
  if (count == 0) H5Sselect_none(memory_space.get());
  const Handle list = comm_ == nullptr ? Handle() : collective_transfer();
  const hid_t transfer_list = list.valid() ? list.get() : H5P_DEFAULT;
  const herr_t result =
      writing ? H5Dwrite(id_.get(), type, memory_space.get(), file_space.get(), transfer_list, data)
              : H5Dread(id_.get(), type, memory_space.get(), file_space.get(), transfer_list, data);
  return result < 0 ? detail::failure_text((writing ? "write " : "read ") + where) : "";
}

template <class T>
void Dataset::read_words(std::span<const Slab> slabs, T* out, int64_t size) const {
  std::vector<uint16_t> words(size);
  const hid_t type = is_words_ ? H5T_NATIVE_UINT16 : detail::file_type(type_);
  transfer(false, Element{type, sizeof(uint16_t)}, slabs, words.data(), size);
  if (type_ == Type::bfloat16)
    std::transform(words.begin(), words.end(), out,
                   [](uint16_t word) { return static_cast<T>(to_float(bf16{word})); });
  else
    std::transform(words.begin(), words.end(), out,
                   [](uint16_t word) { return static_cast<T>(to_float(f16{word})); });
}

void Dataset::transfer(bool writing, DType type, std::span<const Slab> slabs, void* data,
                       int64_t size) const {
  const bool widened = !writing && (type_ == Type::bfloat16 || type_ == Type::float16);
  if (widened && type == DType::f32) return read_words(slabs, static_cast<float*>(data), size);
  if (widened && type == DType::f64) return read_words(slabs, static_cast<double*>(data), size);
  transfer(writing, Element{detail::native_type(type), size_of(type)}, slabs, data, size);
}

void Dataset::read_exactly(std::span<const Slab> slabs, std::span<long double> out) const {
  if (type_ == Type::bfloat16 || type_ == Type::float16)
    return read_words(slabs, out.data(), std::ssize(out));
  transfer(false, Element{H5T_NATIVE_LDOUBLE, sizeof(long double)}, slabs, out.data(),
           std::ssize(out));
}

void Dataset::transfer(bool writing, Element element, std::span<const Slab> slabs, void* data,
                       int64_t size) const {
  const int64_t wanted = elements_of_all(slabs), width = element.width;
  const auto rounds = cut_into_rounds(slabs, std::max<int64_t>(1, transfer_limit_bytes() / width));
  int64_t count = std::ssize(rounds);
  if (comm_ != nullptr) count = all_reduce_value(*comm_, count, ReduceOp::max);

  const std::string what =
      fmt::format("{} {} of {}", writing ? "writing" : "reading", path_, file_);
  run(comm_, what, [&] {
    GYRE_CHECK(wanted == size, "{}: {} elements selected for a buffer of {}", what, wanted, size);
    std::string failure;  // first error; a rank that failed still takes part in all rounds
    in_step(comm_, [&] {
      const Reading scope(what, file_);
      auto* bytes = static_cast<std::byte*>(data);
      for (size_t round = 0; round < static_cast<size_t>(count); ++round) {
        std::span<const Slab> part;
        if (round < rounds.size()) part = rounds[round];
        const std::string error = transfer_round(writing, element.type, part, bytes);
        if (failure.empty()) failure = error;
        bytes += elements_of_all(part) * width;
      }
    });
    if (!failure.empty()) throw Error(ExitCode::runtime, failure);
  });
  if (writing && comm_ != nullptr && comm_->size() > 1) compare_written(element, slabs, data, size);
}

void Dataset::compare_written(Element element, std::span<const Slab> slabs, const void* data,
                              int64_t size) const {
  run(comm_, "flushing " + file_, [&] {
    herr_t result = 0;
    in_step(comm_, [&] {
      const WaitScope scope("flushing " + file_);
      result = H5Fflush(id_.get(), H5F_SCOPE_GLOBAL);
    });
    detail::check(result, fmt::format("flush '{}'", file_));
  });
  std::vector<std::byte> read(size * element.width);
  transfer(false, element, slabs, read.data(), size);
  run(comm_, "comparing", [&] {
    if (!read.empty() && std::memcmp(read.data(), data, read.size()) != 0)
      throw_runtime("dataset '{}' of '{}' does not hold what was written", path_, file_);
  });
}

void Dataset::make_room(int64_t count, int64_t width, const std::function<void()>& allocate) const {
  const std::string what =
      fmt::format("dataset '{}' of '{}', {},", path_, file_, to_string(shape_));
  run(comm_, "making room for " + what, [&] {
    require_memory(what, count, width);
    try {
      allocate();
    } catch (const std::bad_alloc&) {
      throw_runtime("there is no memory for {} {} x {} bytes", what, count, width);
    }
  });
}

void Dataset::read_shares(int64_t width, const ReadSlab& read, void* data) const {
  if (elements() == 0) return;
  if (comm_ == nullptr || comm_->size() == 1 || shape_.empty()) {
    const Slab all{Shape(shape_.size(), 0), shape_};
    return read(std::span(&all, 1), data, elements());
  }
  const int64_t rows = shape_[0], row = elements() / rows;
  const int64_t mine = rows * comm_->rank() / comm_->size();
  const int64_t next = rows * (comm_->rank() + 1) / comm_->size();
  Slab share{Shape(shape_.size(), 0), shape_};
  share.start[0] = mine;
  share.count[0] = next - mine;
  std::vector<std::byte> bytes((next - mine) * row * width);
  read(std::span(&share, 1), bytes.data(), (next - mine) * row);
  const std::vector<std::byte> all = all_gather_bytes(*comm_, bytes);
  std::copy(all.begin(), all.end(), static_cast<std::byte*>(data));
}

void Dataset::read_shares(DType type, void* data) const {
  read_shares(
      size_of(type),
      [&](std::span<const Slab> slab, void* to, int64_t size) {
        transfer(false, type, slab, to, size);
      },
      data);
}

bool operator==(const StoredType& a, const StoredType& b) {
  return a.is_words == b.is_words &&
         H5Tequal(detail::type_of(a).get(), detail::type_of(b).get()) > 0;
}

StoredType stored_type_of(Type type) {
  return detail::describe(detail::file_type(type), "describe a type");
}

StoredType Dataset::stored_type() const {
  const std::string what = fmt::format("describe the type of '{}' of '{}'", path_, file_);
  const Reading scope(what, file_);
  const Handle type(H5Dget_type(id_.get()), H5Tclose);
  detail::check(type.get(), what);
  StoredType stored = detail::describe(type.get(), what);
  stored.is_words = is_words_;
  return stored;
}

void Dataset::read_bytes(std::span<const Slab> slabs, std::span<std::byte> out) const {
  const StoredType stored = stored_type();
  transfer(false, Element{detail::type_of(stored).get(), stored.bytes}, slabs, out.data(),
           std::ssize(out) / stored.bytes);
}

void Dataset::write_bytes(std::span<const Slab> slabs, std::span<const std::byte> data) const {
  const StoredType stored = stored_type();
  transfer(true, Element{detail::type_of(stored).get(), stored.bytes}, slabs,
           const_cast<std::byte*>(data.data()), std::ssize(data) / stored.bytes);
}

void Dataset::write_chunk(const Shape& begin, std::span<const std::byte> chunk) const {
  const std::string where = fmt::format("dataset '{}' of '{}'", path_, file_);
  const Reading scope("writing " + where, file_);
  const Extents at = to_extents(begin);
  detail::check(H5Dwrite_chunk(id_.get(), H5P_DEFAULT, 0, at.data(), chunk.size(), chunk.data()),
                fmt::format("write {}", where));
}

void add_checksum(std::span<std::byte> chunk) {
  // Fletcher's two sums of big-endian words modulo 65535. HDF5 writes 0 as 65535 unless all words
  // are 0. The sums of the swapped words are the swapped sums.
  constexpr size_t together = 4, most = 360;  // the second sum of 360 words fits 32 bits
  const auto fold = [](uint32_t sum) { return (sum & 0xffff) + (sum >> 16); };
  const std::span<std::byte> data = chunk.first(chunk.size() - checksum_bytes);
  uint32_t first = 0, second = 0;
  for (size_t i = 0; i < data.size();) {
    const size_t end = std::min(data.size(), i + most * sizeof(uint16_t));
    for (; i + together * sizeof(uint16_t) <= end; i += together * sizeof(uint16_t)) {
      uint64_t words;
      std::memcpy(&words, &data[i], sizeof(words));
      const uint32_t a = words & 0xffff, b = words >> 16 & 0xffff, c = words >> 32 & 0xffff,
                     d = words >> 48;
      second += 4 * first + 4 * a + 3 * b + 2 * c + d;
      first += a + b + c + d;
    }
    for (; i < end; i += sizeof(uint16_t)) {
      uint16_t word;
      std::memcpy(&word, &data[i], sizeof(word));
      second += first += word;
    }
    first = fold(first);
    second = fold(second);
  }
  first = fold(first);
  second = fold(second);
  const uint32_t sums[] = {first, second};
  for (size_t i = 0; i < 2; ++i) {
    const auto big = static_cast<uint16_t>(sums[i]);
    chunk[data.size() + 2 * i] = static_cast<std::byte>(big >> 8);
    chunk[data.size() + 2 * i + 1] = static_cast<std::byte>(big & 0xff);
  }
}

std::vector<std::byte> Dataset::read_all_bytes() const {
  const StoredType stored = stored_type();
  const Handle type = detail::type_of(stored);
  std::vector<std::byte> out;
  make_room(elements(), stored.bytes, [&] { out.resize(elements() * stored.bytes); });
  read_shares(
      stored.bytes,
      [&](std::span<const Slab> slab, void* to, int64_t size) {
        transfer(false, Element{type.get(), stored.bytes}, slab, to, size);
      },
      out.data());
  return out;
}

std::vector<std::string> Dataset::read_texts_here() const {
  const Handle type(H5Dget_type(id_.get()), H5Tclose);
  const Handle space(H5Dget_space(id_.get()), H5Sclose);
  const size_t count = elements();
  if (count == 0) return {};
  const std::string what = fmt::format("dataset '{}' of '{}'", path_, file_);
  const Reading scope("reading " + what, file_);
  return detail::read_texts(
      what + ", " + to_string(shape_) + ",", type.get(), space.get(), count,
      static_cast<int64_t>(std::filesystem::file_size(file_)),
      [&](hid_t memory_type, hid_t transfer_list, void* buffer) {
        detail::check(H5Dread(id_.get(), memory_type, H5S_ALL, H5S_ALL, transfer_list, buffer),
                      "read " + what);
      });
}

std::vector<std::string> Dataset::read_texts() const {
  if (comm_ == nullptr) return read_texts_here();
  std::vector<std::string> texts;
  run_on_root(*comm_, "reading " + path_, [&] { texts = read_texts_here(); });
  return broadcast_texts(*comm_, texts);
}

}  // namespace gyre::h5
