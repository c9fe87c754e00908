#pragma once
// Distributed encoding of an audio batch over the ranks of a context-parallel group.
//
// Each of the W ranks of the group starts from the same batch of A items and needs all encodings:
//
//     q = ceil(A / W); append q·W - A dummies: silence of the shortest real length
//     rank r encodes items [r·q, (r+1)·q)
//     gather; rebuild the original order; drop padding and dummies
//
//     A = 5, W = 4     rank 0: 0 1    rank 1: 2 3    rank 2: 4 dummy    rank 3: dummy dummy
//
// Every rank calls the encoder equally often, even if only for dummies: with sharded weights the
// call itself is a collective. Work is split by the number of items, not by their duration. (After
// encode_audio_with_cp_distribution of NeMo Speech, which gathers `padded`.)

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "core/view.hpp"
#include "sharding/distributed.hpp"

namespace gyre {

/// A batch of audio, the same on all ranks of a group.
struct AudioBatch {
  MatrixView<const float> samples;   ///< [A, n], zero after each item's length
  std::span<const int64_t> lengths;  ///< [A], each 0 to n
};

/// Encodes one item: samples [n], of which the first `length` are valid, into [frames, hidden].
using AudioEncoder =
    std::function<std::vector<float>(std::span<const float> samples, int64_t length)>;

/// How encodings are gathered.
enum class GatherKind {
  padded,  ///< all items and dummies, padded to the F rows of the longest: q · F rows per rank
  ragged,  ///< only the real rows of each rank (NeMo pads its flat buffers to the longest one)
};

struct EncodeOptions {
  int64_t hidden = 1;
  GatherKind gather = GatherKind::ragged;
  /// Ranks that communicate inside the encoder, because its weights are sharded over them. A rank
  /// with a smaller or text-only batch joins with dummies. Must contain the context-parallel group.
  /// Without an encoder group, the encoder must not communicate.
  Communicator* encoder_group = nullptr;
};

/// Marks a dummy in the result of distribute_items.
inline constexpr int64_t dummy_item = -1;

/// Which items each of `ranks` ranks encodes, in order: [ranks][q], dummies included.
std::vector<std::vector<int64_t>> distribute_items(int64_t items, int ranks);

/// The encodings [frames, hidden] of all items in order, identical on all ranks and to those of a
/// single rank. Collective over `comm` and the encoder group. All ranks of the group throw the same
/// usage error when their batches differ in number, width or total length of the items (it names
/// both values; without this check, ranks would hang), when a length is not within 0 to n, or when
/// an encoding is not a whole number of rows of `hidden` values. If the encoder throws on a rank,
/// all ranks throw; but with an encoder group, where others may wait for that rank inside the
/// encoder, only that rank throws. comm.traffic() counts the bytes moved.
std::vector<std::vector<float>> encode_distributed(Communicator& comm, const AudioBatch& audio,
                                                   const AudioEncoder& encode,
                                                   const EncodeOptions& options);

/// Gradient of encode_distributed. `grads` [A][frames, hidden] are this rank's gradients with
/// respect to the encodings of all items. Returns the gradients of the real items that this rank
/// encoded, in order, for the backward pass of its own encoder calls. `sum` adds the gradients of
/// all ranks (a reduce-scatter): the ranks' losses are parts of one sum when the sequence is
/// sharded. `split` takes the local gradients unchanged; `none` returns zeros. Collective; all
/// ranks throw the same usage error when the sizes or the convention differ between ranks.
std::vector<std::vector<float>> encoder_gradient(Communicator& comm,
                                                 std::span<const std::vector<float>> grads,
                                                 GatherGradient convention);

}  // namespace gyre
