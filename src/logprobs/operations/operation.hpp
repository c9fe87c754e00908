#pragma once
// An operation on rows of logits, as data. operation_scores.hpp runs any operation:
//
//     forward    one pass over each rank's columns, one all-gather: the statistics of each row,
//                with the same bits on all ranks; values() makes the results from them
//     backward   slopes() gives the derivatives of the results by the statistics; one pass over
//                each rank's columns, no communication (row_gradient.hpp)
//
// An operation is a file of this folder and a line of list.hpp. Its options, inputs and results in
// files, its checks, its row in the table of gyre-logprobs and its tests follow from the entry.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gyre {

/// A forward pass computes these statistics of each row. They depend on no other row.
struct RowStatistics {
  double log_sum_exp = 0;   ///< log Σ_v exp(z_v / T); NaN if the row is no distribution
  double entropy = 0;       ///< nats; if RowOperation::entropy
  double mean_logprob = 0;  ///< (1/V) Σ_v log p_v; if RowOperation::mean_logprob
  /// [K] log-probabilities of the row's ids or, of an operation on logits, their logits; 0 for an
  /// id outside the vocabulary.
  std::span<const double> of_ids = {};
};

/// Derivatives of Σ_i g_i value_i by the statistics.
struct RowSlopes {
  double log_sum_exp = 0, entropy = 0, mean_logprob = 0;
  std::span<double> of_ids = {};  ///< [K], 0 before a call
};

/// A row's ids, other inputs and parameters.
struct OperationRow {
  RowStatistics statistics;
  int64_t vocab_size = 0;
  std::span<const int32_t> ids = {};                    ///< [K]
  std::span<const std::span<const float>> inputs = {};  ///< the row of each of RowOperation::inputs
  std::span<const double> parameters = {};              ///< of RowOperation::parameters

  bool is_id(size_t k) const { return ids[k] >= 0 && ids[k] < vocab_size; }
};

/// A whole row, for definitions.
struct WholeRow : OperationRow {
  std::span<const double> logits;    ///< [vocab_size]
  std::span<const double> logprobs;  ///< [vocab_size], at the row's temperature
  double temperature = 1;
};

/// Results of a row and the gradient of its logits, by the definition.
struct RowAnswer {
  std::vector<double> values;    ///< of all results, one after the other
  std::vector<double> d_logits;  ///< [vocab_size]
};

/// A number of the run that the operation depends on: an option of this name, with dashes, and an
/// attribute of files.
struct RowParameter {
  std::string name;  ///< in words with underscores
  std::string help;
  double usual = 0, least = 0, most = 0;

  std::string option() const;  ///< with dashes
  std::string range() const;   ///< "from 0 to 1"
};

/// An input of floats for each row, beside the ids, that other operations need not read.
struct RowInput {
  std::string name;
  std::string shape;  ///< as in LogprobsShape: "T" or "TK"
  /// Says what is wrong with a row; "" if nothing is.
  std::string (*fault)(std::span<const int32_t> ids, std::span<const float> values) = nullptr;
  /// Makes up a row from uniform random numbers above 0 and below 1, one for each of its values.
  void (*make)(std::span<const int32_t> ids, std::span<const double> random,
               std::span<float> values) = nullptr;
};

/// How exact a result is.
enum class RowError {
  logprob,  ///< as a log-probability
  entropy,  ///< as an entropy
  exact,    ///< a copy of an input
  sum,      ///< as the statistics that it is a function of, by its slopes
};

/// An array of results. Its element (t, k) has the upstream gradient `first_gradient` + k of the
/// token (LogprobsInputs::gradient); none if that is negative.
struct RowResult {
  std::string name;
  std::string shape = "T";  ///< "T", or "TK": one for each id
  const char* check = "";   ///< name of its check
  RowError error = RowError::sum;
  int first_gradient = 0;
  std::vector<std::string> reads = {"logits"};  ///< inputs that it depends on
};

/// Statistics as results: those of the ids, then the entropy if the row has one.
void statistics_as_values(const OperationRow& row, std::span<double> values);
void slopes_of_statistics(const OperationRow& row, std::span<const double> g, RowSlopes& slopes);

/// The definition in double precision, from a whole row, for the gradients g of the results. An
/// entry without one does not compile.
struct RowDefinition {
  template <class Function>
  RowDefinition(Function function_) : function(function_) {}
  RowAnswer operator()(const WholeRow& row, std::span<const double> g) const {
    return function(row, g);
  }
  RowAnswer (*function)(const WholeRow& row, std::span<const double> g);
};

struct RowOperation {
  using Values = void (*)(const OperationRow& row, std::span<double> values);
  using Slopes = void (*)(const OperationRow& row, std::span<const double> g, RowSlopes& slopes);

  std::string name;
  std::string summary;
  std::string definition;  ///< routines of reference.hpp that define() calls, or the formula

  std::string ids = {};          ///< input with the ids of a row: "targets" or "ids"; "": none
  bool ids_are_largest = false;  ///< of a teacher: at most as many as the vocabulary has
  bool on_logits = false;  ///< reads the logits of ids and nothing else: there is no pass forward
  bool entropy = false, mean_logprob = false;  ///< whether it reads these statistics
  bool at_temperature_1 = false;               ///< whether it ignores --temperature
  /// Inputs other than the ids; those that no other operation knows are in `own_inputs` too.
  std::vector<std::string> inputs = {};
  std::vector<RowInput> own_inputs = {};
  std::vector<RowParameter> parameters = {};
  std::vector<RowResult> results = {};
  std::string gradient;  ///< array of the logits' gradient
  /// Inputs that the gradient depends on; empty: those of the results, and the gradients of these.
  std::vector<std::string> gradient_reads = {};
  /// Arrays whose sum is the gradient, for files that have these instead.
  std::vector<std::string> gradient_is_sum_of = {};
  bool headline = false;  ///< whether its rate is the figure of merit of a run with it

  /// Results of a row, one after the other, from its statistics.
  Values values = statistics_as_values;
  /// Adds the derivatives of Σ g_i value_i. Not called if g is 0.
  Slopes slopes = slopes_of_statistics;
  /// Sizes of the terms that slopes() adds up, times their own sensitivity to errors of the
  /// statistics; null: slopes() is exact.
  Slopes sizes = nullptr;
  RowDefinition define;

  /// Number of results of a row with K ids.
  int64_t width(int64_t ids_per_row) const;
  int64_t width_of(const RowResult& result, int64_t ids_per_row) const {
    return result.shape == "T" ? 1 : ids_per_row;
  }
  /// Whether the results are the statistics themselves.
  bool is_statistic() const { return values == statistics_as_values; }
  /// Floats of a row that a rank sends in the all-gather, or adds in the all-reduce (on_logits).
  int64_t sent_floats(int64_t ids_per_row) const;
};

/// All operations, in the order of tables.
const std::vector<RowOperation>& row_operations();
/// The parameters and own inputs of all operations, each once.
const std::vector<RowParameter>& row_parameters();
const std::vector<RowInput>& row_inputs();

// Parts of entries.

/// out <- log-softmax of a few logits; NaN throughout if none is finite.
template <class T>
void log_softmax_of(std::span<const T> logits, std::span<double> out) {
  double max = -HUGE_VAL, sum = 0;
  for (const double z : logits) max = std::max(max, z);
  for (const double z : logits) sum += std::exp(z - max);
  for (size_t k = 0; k < logits.size(); ++k)
    out[k] = static_cast<double>(logits[k]) - max - std::log(sum);
}

}  // namespace gyre
