#include "sharding/encoder_work.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

void check_audio(Communicator& comm, const AudioBatch& audio, const EncodeOptions& options) {
  const int64_t total = std::accumulate(audio.lengths.begin(), audio.lengths.end(), int64_t{0});
  agree_on_arguments(
      comm, "encoding audio",
      [&] {
        if (options.hidden < 1)
          throw_usage("encodings of {} values; at least 1 is needed", options.hidden);
        if (std::ssize(audio.lengths) != audio.samples.rows)
          throw_usage("{} lengths for {} audio items", audio.lengths.size(), audio.samples.rows);
        for (size_t i = 0; i < audio.lengths.size(); ++i)
          if (audio.lengths[i] < 0 || audio.lengths[i] > audio.samples.cols)
            throw_usage("audio item {}: length {} is not within 0 to {}, the width of the batch", i,
                        audio.lengths[i], audio.samples.cols);
      },
      {{"the number of items", audio.samples.rows},
       {"the width of the batch", audio.samples.cols},
       {"the total length of the items", total},
       {"the kind of gather", static_cast<int64_t>(options.gather)}},
      options.encoder_group);
}

/// Values on which the ranks agree before encoding.
struct Joint {
  int64_t calls;         ///< encoder calls on every rank
  int64_t dummy_length;  ///< samples of a dummy item: the shortest real length
};

Joint agree_on_calls(const AudioBatch& audio, int64_t share, const EncodeOptions& options) {
  Joint joint{share, std::numeric_limits<int64_t>::max()};
  for (const int64_t length : audio.lengths)
    joint.dummy_length = std::min(joint.dummy_length, length);
  if (options.encoder_group != nullptr) {
    joint.calls = all_reduce_value(*options.encoder_group, joint.calls, ReduceOp::max);
    joint.dummy_length =
        all_reduce_value(*options.encoder_group, joint.dummy_length, ReduceOp::min);
  }
  return joint;
}

/// Encodings of this rank's items and dummies.
std::vector<std::vector<float>> encode_share(const AudioBatch& audio,
                                             const std::vector<int64_t>& share, const Joint& joint,
                                             const AudioEncoder& encode, int64_t hidden) {
  std::vector<std::vector<float>> encodings;
  const size_t width = audio.samples.cols;
  // A rank without audio may have width 0.
  std::vector<float> silence;
  for (int64_t call = 0; call < joint.calls; ++call) {
    const int64_t item = call < std::ssize(share) ? share[call] : dummy_item;
    std::vector<float> encoding;
    if (item == dummy_item) {
      silence.resize(std::max<size_t>(width, joint.dummy_length), 0.0f);
      encoding = encode(silence, joint.dummy_length);
    } else {
      encoding = encode({audio.samples.row(item), width}, audio.lengths[item]);
    }
    if (std::ssize(encoding) % hidden != 0)
      throw_usage("audio item {}: an encoding of {} values is not a number of rows of {}", item,
                  encoding.size(), hidden);
    if (call < std::ssize(share)) encodings.push_back(std::move(encoding));
  }
  return encodings;
}

template <class T>
std::vector<T> all_gather_vector(Communicator& comm, const std::vector<T>& mine,
                                 std::string_view what) {
  std::vector<T> all(mine.size() * comm.size());
  HostStream stream;
  comm.all_gather(bytes_of(std::span<const T>(mine)), writable_bytes_of(std::span<T>(all)), stream,
                  what)
      ->wait();
  return all;
}

/// Number of values of each item of all ranks, dummies included: [W · q].
std::vector<int64_t> gather_sizes(Communicator& comm,
                                  const std::vector<std::vector<float>>& encodings) {
  std::vector<int64_t> sizes;
  for (const std::vector<float>& encoding : encodings) sizes.push_back(std::ssize(encoding));
  return all_gather_vector(comm, sizes, "lengths of encodings");
}

/// All-gather with every item padded to the longest encoding of any rank.
std::vector<std::vector<float>> gather_padded(Communicator& comm,
                                              const std::vector<std::vector<float>>& encodings,
                                              int64_t items) {
  int64_t longest = 0;
  for (const std::vector<float>& encoding : encodings)
    longest = std::max(longest, std::ssize(encoding));
  longest = all_reduce_value(comm, longest, ReduceOp::max);
  std::vector<float> mine(encodings.size() * longest, 0.0f);
  for (size_t i = 0; i < encodings.size(); ++i)
    std::copy(encodings[i].begin(), encodings[i].end(), mine.begin() + i * longest);
  const std::vector<float> all = all_gather_vector(comm, mine, "padded encodings");
  const std::vector<int64_t> sizes = gather_sizes(comm, encodings);
  std::vector<std::vector<float>> result;
  // Items are in rank order with dummies last, so that item i is the i-th overall.
  for (int64_t i = 0; i < items; ++i)
    result.emplace_back(all.begin() + i * longest, all.begin() + i * longest + sizes[i]);
  return result;
}

/// All-gather of each rank's concatenated real items, without padding.
std::vector<std::vector<float>> gather_ragged(Communicator& comm,
                                              const std::vector<std::vector<float>>& encodings,
                                              const std::vector<int64_t>& share, int64_t items) {
  std::vector<float> mine;
  for (size_t i = 0; i < encodings.size(); ++i)
    if (share[i] != dummy_item) mine.insert(mine.end(), encodings[i].begin(), encodings[i].end());
  const std::vector<int64_t> sizes = gather_sizes(comm, encodings);
  const int64_t each = std::ssize(share);
  std::vector<int64_t> bytes(comm.size(), 0);
  for (int64_t i = 0; i < items; ++i) bytes[i / each] += sizes[i] * sizeof(float);
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  std::vector<float> all(total / sizeof(float));
  HostStream stream;
  comm.all_gather_v(bytes_of(std::span<const float>(mine)),
                    writable_bytes_of(std::span<float>(all)), bytes, stream, "encodings")
      ->wait();
  std::vector<std::vector<float>> result;
  auto at = all.begin();
  for (int64_t i = 0; i < items; at += sizes[i], ++i) result.emplace_back(at, at + sizes[i]);
  return result;
}

int64_t total_size(std::span<const std::vector<float>> values) {
  int64_t total = 0;
  for (const std::vector<float>& value : values) total += std::ssize(value);
  return total;
}

/// Reduce-scatter of the gradients: one flat block per rank, padded to the longest.
std::vector<float> reduce_shares(Communicator& comm, std::span<const std::vector<float>> grads,
                                 int64_t each) {
  std::vector<int64_t> sizes(comm.size(), 0);
  for (int64_t i = 0; i < std::ssize(grads); ++i) sizes[i / each] += std::ssize(grads[i]);
  const int64_t block = *std::max_element(sizes.begin(), sizes.end());
  std::vector<float> blocks(block * comm.size(), 0.0f);
  for (int64_t r = 0; r < comm.size(); ++r) {
    auto at = blocks.begin() + r * block;
    for (int64_t i = r * each; i < std::min((r + 1) * each, std::ssize(grads)); ++i)
      at = std::copy(grads[i].begin(), grads[i].end(), at);
  }
  std::vector<float> mine(block);
  HostStream stream;
  comm.reduce_scatter(blocks.data(), mine.data(), block, DType::f32, ReduceOp::sum, stream,
                      "gradient of encodings")
      ->wait();
  return mine;
}

}  // namespace

std::vector<std::vector<int64_t>> distribute_items(int64_t items, int ranks) {
  if (items < 0) throw_usage("{} items; there are at least 0", items);
  if (ranks < 1) throw_usage("items over {} ranks; there is at least 1", ranks);
  const int64_t each = ceil_div(items, ranks);
  std::vector<std::vector<int64_t>> shares(ranks);
  for (int64_t i = 0; i < each * ranks; ++i) shares[i / each].push_back(i < items ? i : dummy_item);
  return shares;
}

std::vector<std::vector<float>> encode_distributed(Communicator& comm, const AudioBatch& audio,
                                                   const AudioEncoder& encode,
                                                   const EncodeOptions& options) {
  check_audio(comm, audio, options);
  const int64_t items = audio.samples.rows;
  const std::vector<int64_t> share = distribute_items(items, comm.size())[comm.rank()];
  const Joint joint = agree_on_calls(audio, std::ssize(share), options);
  std::vector<std::vector<float>> encodings;
  const auto encode_all = [&] {
    encodings = encode_share(audio, share, joint, encode, options.hidden);
  };
  if (options.encoder_group != nullptr)
    encode_all();
  else
    run_agreed(comm, "encoding audio", encode_all);
  if (items == 0) return {};
  return options.gather == GatherKind::padded ? gather_padded(comm, encodings, items)
                                              : gather_ragged(comm, encodings, share, items);
}

std::vector<std::vector<float>> encoder_gradient(Communicator& comm,
                                                 std::span<const std::vector<float>> grads,
                                                 GatherGradient convention) {
  agree_on_arguments(comm, "gradient of encodings", [] {},
                     {{"the number of items", std::ssize(grads)},
                      {"the number of values", total_size(grads)},
                      {"the gradient convention", static_cast<int64_t>(convention)}});
  if (grads.empty()) return {};
  const int64_t each = ceil_div(std::ssize(grads), comm.size());
  std::vector<std::vector<float>> mine;
  const int64_t end = std::min((comm.rank() + 1) * each, std::ssize(grads));
  for (int64_t i = comm.rank() * each; i < end; ++i) mine.push_back(grads[i]);
  if (convention == GatherGradient::none)
    for (std::vector<float>& grad : mine) std::fill(grad.begin(), grad.end(), 0.0f);
  if (convention == GatherGradient::sum) {
    const std::vector<float> summed = reduce_shares(comm, grads, each);
    auto at = summed.begin();
    for (std::vector<float>& grad : mine) {
      std::copy_n(at, grad.size(), grad.begin());
      at += std::ssize(grad);
    }
  }
  return mine;
}

}  // namespace gyre
