#pragma once
// The definition of a recurrence (kind.hpp), token by token in double precision: the twin of the
// chunked kernel. Serial, never tuned.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "recurrence/kind.hpp"

namespace gyre {

/// The inputs of one value head over one document, [tokens, dim] each.
struct RecurrenceHead {
  int64_t tokens = 0;
  std::vector<double> q, k, v, g, beta, d_out;  ///< beta: empty without the delta rule
  /// Squares of errors of q, k and v, which a convolution has computed; empty: they are exact.
  std::vector<double> q_errors = {}, k_errors = {}, v_errors = {};
};

/// Values [tokens, dim], and for each token the size of the terms that the row is the sum of.
struct SizedRows {
  std::vector<double> values;
  std::vector<double> sizes;  ///< [tokens]
};

/// Results of one value head. Those of q and k are terms of this value head: the gradient of a key
/// head is their sum over its group, and its size the root of the sum of their squares.
///
/// A size is the root of the mean, over the elements of a row, of the sum of the squares of their
/// terms, with the errors that their factors have made by the same rule. The state itself may be
/// small where its terms cancel; its errors are then those of the terms. Errors pass the delta rule
/// as the state does: I - beta k kᵀ makes nothing larger while beta |k|² <= 2. The kernel's d_g is
/// a difference of sums over a chunk of 64 tokens, whose terms count.
struct RecurrenceHeadResults {
  SizedRows out, d_q, d_k, d_v, d_g, d_beta;
};

/// Forward, and with `backward` the gradients.
RecurrenceHeadResults recurrence_reference(const RecurrenceShape& shape, const RecurrenceHead& head,
                                           bool backward);

/// Reads the row [heads, dim] of an input array; tokens are those of all documents, concatenated.
using RecurrenceRows =
    std::function<void(RecurrenceArray array, int64_t token, std::span<float> row)>;

/// Results of a key head and its value heads over a document, by RecurrenceArray: values [tokens,
/// heads, dim], sizes [tokens, heads], where heads are those of the array in the group. Gradients
/// are empty after a forward alone.
struct RecurrenceGroupResults {
  SizedRows arrays[recurrence_arrays];
  /// Of a convolution: the document's gradients of the weights of the group's channels, and the
  /// squares of their sizes, [channels, width] each; channels of queries, of keys, of values.
  std::vector<double> d_weights = {}, d_weight_squares = {};
  const SizedRows& operator[](RecurrenceArray array) const {
    return arrays[static_cast<int>(array)];
  }
  SizedRows& operator[](RecurrenceArray array) { return arrays[static_cast<int>(array)]; }
};

/// Tokens [begin, begin + tokens) are a document.
struct DocumentTokens {
  int64_t begin = 0, tokens = 0;
};

/// The definition of one key head over a document. weights: of the convolution, [channels, width].
RecurrenceGroupResults reference_group(const RecurrenceShape& shape, const RecurrenceRows& rows,
                                       const DocumentTokens& document, int64_t key_head,
                                       bool backward, std::span<const float> weights = {});

}  // namespace gyre
