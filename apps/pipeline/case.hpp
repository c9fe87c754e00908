#pragma once
// The case of gyre-pipeline: a pass of the decoder over all documents. Its scores are compared with
// the reference in the input file, or with the serial reference decoder (the "twin").

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/process_grid.hpp"
#include "harness/case.hpp"
#include "harness/result_array.hpp"
#include "harness/row.hpp"
#include "io/schemas/model_file.hpp"
#include "io/schemas/results.hpp"
#include "model/scoring.hpp"
#include "model/teacher.hpp"
#include "model/tolerance.hpp"
#include "report/progress.hpp"
#include "report/result.hpp"

namespace gyre {

/// Measurements of one configuration. FLOPs and wire bytes are per pass.
struct ScoringResult : MeasuredRow {
  GridShape shape;
  std::string layout, schedule;
  int64_t tokens = 0, predictions = 0, bins = 0;
  double packing = 0;         ///< real tokens over capacity
  double exposed = 0;         ///< maximum over ranks of the pass's share spent waiting for messages
  double pair_imbalance = 0;  ///< of attention, from the plans
  double time_imbalance = 0;  ///< of attention, measured
  /// Time of the work at the machine's limits, maximum over ranks, over the time of a pass.
  double share_of_limit = 0;
  double kl = 0;  ///< mean divergence from the teacher, nats; NaN without one
  double predicted_ms = std::numeric_limits<double>::quiet_NaN();  ///< by the model of --machine
  /// The most messages and the most bytes that a rank has sent in recurrent layers in a pass; none
  /// without such layers.
  std::optional<RecurrentTraffic> recurrent = {};
  int ranks() const { return shape.ranks(); }
  double tokens_per_second() const { return tokens / time_ms.median * 1e3; }
  /// Measurements that only some runs have: name, value, unit.
  std::vector<std::tuple<std::string, Value, std::string>> further() const;
};

/// A model whose predictions are compared with those of the model that is run.
struct TeacherModel {
  ModelFile file;
  ModelConfig config;  ///< its vocabulary is padded as the model's
  ScoringPlan plan;    ///< plan_teacher()

  WeightReader read_weights();
};

/// The inputs of a run.
struct ScoringInputs {
  const Documents& documents;
  const std::string& input;                   ///< the file of the documents
  const std::optional<Reference>& reference;  ///< answers in that file
  ModelFile& model;
  const std::string& model_sha256;
  TeacherModel* teacher;  ///< null: no divergences
  double predicted_s;     ///< of a pass; NaN: unknown
  int64_t check_tokens;   ///< budget of the twin, in tokens
  double check_seconds;   ///< budget of the twin, in seconds
};

class ScoringCase final : public Case {
 public:
  /// Plans the bins of this rank, without communication; the decoder runs on `grid`. `world`: all
  /// ranks, in host memory.
  ScoringCase(const ScoringPlan& plan, const ScoringInputs& inputs, ProcessGrid& grid,
              Communicator& world, Progress& progress);
  /// Sets the decoders that passes run; `of_teacher` is null without one. Collective.
  void set_decoders(Decoder& decoder, Decoder* of_teacher);
  /// The row, with its key.
  ScoringResult row() const;
  /// Fills in the columns of a measured pass; `last_ms` is the time of the last
  /// pass on this rank. Collective.
  void complete(ScoringResult& row, double last_ms);
  /// This rank's part of the scores of the last pass. Collective.
  const ScoreRange& scores();
  /// Sums of these scores over each document. Collective.
  const std::vector<DocumentScore>& document_scores();
  /// "#" lines that name the references of the comparisons.
  const std::string& comparison_text() const { return notes_; }
  const Scorer& scorer() const { return scorer_; }
  const std::optional<Teacher>& teacher() const { return teacher_; }
  /// Work of this rank in a pass.
  PassWork work() const;
  /// Times of the last pass.
  const DecoderTimes& times() const { return times_; }

  std::string label(Pass) const override { return ""; }
  const char* run_word() const override { return "pass"; }
  void prepare(Pass, bool) override {}
  void run(Pass pass) override;
  SentTraffic sent() const override;
  std::optional<uint64_t> checksum(Pass pass) override;
  /// Compares all scores with the reference in the input. Arrays that it lacks
  /// are compared with the twin on a sample.
  void verify(Pass pass, Verification& checks) override;

 private:
  /// A token of this rank, and its row of the residual stream after the embedding and after every
  /// layer: [layers + 1].
  struct HiddenRow {
    int64_t token, document, position;
    std::vector<std::vector<float>> x;
  };
  /// Runs the decoder once more. Keeps copies, because reading the reference is collective while
  /// the number of bins differs by rank.
  std::vector<HiddenRow> hidden_rows();
  /// Runs the decoder with perturbed norms, where its tolerances need that (tolerance.hpp). The
  /// scores() of the last pass must be known. `hidden`: the rows of a pass, or null. Collective.
  void measure_changes(const std::vector<HiddenRow>* hidden);
  /// Compares the residual stream with the reference's: checks "hidden[0]", "hidden[1]", ...
  void verify_hidden(const std::vector<HiddenRow>& rows, Verification& checks);
  /// Compares what the last pass has sent in recurrent layers with its closed form.
  void verify_recurrent_traffic(Verification& checks) const;
  /// Compares arrays that the reference lacks with the scores of the twin.
  void verify_by_twin(Verification& checks);
  /// Bound of the errors of scores of documents of up to `longest` tokens. `of_twin`: the reference
  /// is the twin, whose weights are rounded like those of the pass.
  double tolerance(const ModelConfig& config, std::span<const double> logprobs, int64_t longest,
                   bool of_twin) const;
  DecoderShape shape_of(const ModelConfig& config, int64_t layers, int64_t longest,
                        bool of_twin) const;
  /// Expected standard deviation of the errors of `count` values of this rank, from the sum of
  /// squares of what the perturbation changed (tolerance.hpp); 0 in an f32 pass. Collective.
  double sigma(double squares, int64_t count, double tolerance) const;
  double sigma(int64_t layer, const std::vector<HiddenRow>& rows, double tolerance,
               double over_change) const;
  /// Scale of the errors of a value whose changes have this mean square, at least `scale`.
  static double scale_of(double scale, double change, double over_change, double tolerance) {
    return std::max(scale, std::sqrt(change) * over_change / tolerance);
  }
  /// Fails a check most of whose values, `wide` of `all`, have a tolerance that zeros would meet.
  /// Collective.
  void require_verified(int64_t wide, int64_t all, Check& check) const;
  double over_change_of(const ModelConfig& config, int64_t longest, bool of_twin) const;
  struct ExpectedScore {
    int64_t token;
    double value, scale = 1;
  };
  /// Scores of the pass, what perturbed norms change in them, and what is expected of some tokens
  /// of this rank.
  struct ScoreComparison {
    const char* name;
    double tolerance;
    double over_change;  ///< tolerance_over_change()
    const std::vector<float>& got;
    const std::vector<double>& changes;  ///< mean squares, or empty
    std::vector<ExpectedScore> expected = {};
    bool answers = false;                          ///< the file's, not the twin's
    std::pair<int64_t, int64_t> sampled = {0, 0};  ///< tokens that are compared, all tokens
  };
  void compare_scores(const ScoreComparison& of, Verification& checks) const;

  const ScoringPlan& plan_;
  ScoringInputs in_;
  ModelConfig config_;
  ProcessGrid& grid_;
  Communicator& world_;
  Progress& progress_;
  Scorer scorer_;
  std::optional<Teacher> teacher_;
  Decoder* decoder_ = nullptr;
  DecoderTimes times_;
  RecurrentTraffic recurrent_sent_;  // in the last pass
  int64_t passes_ = 0;
  std::optional<ScoreRange> scores_;
  std::vector<DocumentScore> document_scores_;  // of scores_, or empty
  struct {
    std::vector<double> logprob, entropy, kl;
    std::vector<std::vector<double>> rows;  // of the elements of each HiddenRow: [layers + 1]
  } changes_;                               // mean squares of what perturbed norms change; or empty
  std::vector<int64_t> offsets_;            // first prediction of each document
  std::string notes_;
};

/// The shape of the hidden states of a model of this configuration.
HiddenShape hidden_shape(const ModelConfig& config);

/// States which arrays of a reference are compared.
std::vector<AnswerUse> answer_uses(const Reference& reference);

/// Reads slices of the weights of `model`.
WeightReader weights_of(ModelFile& model);

}  // namespace gyre
