// Divergences from a teacher on every grid of the world's size, against the serial twins of both
// models; what its passes cost; which replica gets which bins.

#include "model/teacher.hpp"

#include <numeric>

#include "comm/agree.hpp"
#include "model/decoder_reference.hpp"
#include "random_model.hpp"
#include "scoring_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Documents;
using test::world;

/// A model of the vocabulary of small_config() that differs in everything else.
ModelConfig teacher_config() {
  ModelConfig c = test::small_config();
  c.vocab_padded = 40;
  c.hidden_size = 16;
  c.num_hidden_layers = 3;
  c.num_attention_heads = 16;
  c.head_dim = 4;
  c.intermediate_size = 24;
  c.rope_theta = 500;
  c.final_soft_cap = 5;
  return c;
}

std::vector<double> twin_divergences(const Documents& documents, const ModelConfig& student,
                                     const ModelConfig& teacher) {
  const auto whole = [](const ModelConfig& config) {
    return load_weights(config, 1, 0, test::random_weights(config), DType::f32);
  };
  const DecoderWeights of_student = whole(student), of_teacher = whole(teacher);
  std::vector<double> all;
  for (int64_t d = 0; d < documents.view().size(); ++d) {
    const auto tokens = documents.view().document(d);
    const auto logits = logits_reference(student, of_student, tokens);
    ReferenceScores scores = scores_reference(student, logits, tokens);
    add_divergences_reference(student, logits, teacher,
                              logits_reference(teacher, of_teacher, tokens), scores);
    all.insert(all.end(), scores.kl.begin(), scores.kl.end());
  }
  return all;
}

/// A student and its teacher on a grid.
struct Lesson {
  Lesson(const Documents& documents, const ModelConfig& student_config,
         const ModelConfig& teacher_config, const ScoringSetup& setup, int64_t min_prefix = 0)
      : student(student_config),
        plan(test::plan_of(documents, student, setup, min_prefix)),
        grid(world(), setup.grid),
        of_teacher(padded(teacher_config)),
        teacher_plan(plan_teacher(plan, student, of_teacher, documents.offsets)),
        scorer(documents.view(), student, plan, grid),
        teacher(documents.view(), of_teacher, student, teacher_plan, grid),
        decoder(decoder_of(student, test::random_weights(student))),
        teacher_decoder(decoder_of(
            of_teacher, with_padding(test::random_weights(teacher_config),
                                     teacher_config.vocab_padded, student.vocab_padded))) {
    teacher.set_decoder(teacher_decoder);
    scorer.observe_bins(
        [&](ConstMatrixRef h, ConstMatrixRef head) { teacher.keep_student(h, head); },
        [&](int64_t shard, std::span<PredictionScore> scores) {
          return teacher.diverge(shard, scores);
        });
  }
  ModelConfig padded(ModelConfig config) const {
    config.vocab_padded = student.vocab_padded;
    return config;
  }
  Decoder decoder_of(const ModelConfig& config, const WeightReader& read) {
    const ScoringSetup& setup = plan.setup;
    return {config,
            setup.types,
            load_weights(config, setup.grid.tp, grid.tp_rank(), read, setup.types.activations),
            grid,
            *kernel,
            stream};
  }

  ModelConfig student;
  ScoringPlan plan;
  ProcessGrid grid;
  ModelConfig of_teacher;
  ScoringPlan teacher_plan;
  HostStream stream;
  std::unique_ptr<BlockKernel> kernel = make_cpu_kernel();
  Scorer scorer;
  Teacher teacher;
  Decoder decoder, teacher_decoder;
};

// Documents by themselves, and prompts and their answers, stored once.
TEST(Teacher, DivergencesOnEveryGridAreThoseOfTheSerialTwins) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig student = test::small_config();
  for (const int64_t min_prefix : {0, 1, 4}) {
    const Documents documents =
        min_prefix == 0 ? test::ragged_documents(student) : test::rollouts(student);
    const std::vector<double> twin = twin_divergences(documents, student, teacher_config());
    EXPECT_GT(*std::ranges::max_element(twin), 0.5);
    for (const GridShape& shape : test::all_grids(student)) {
      Lesson lesson(documents, student, teacher_config(), test::setup_of(shape), min_prefix);
      EXPECT_EQ(lesson.plan.tokens<std::ssize(documents.tokens), min_prefix> 0);
      lesson.scorer.run(lesson.decoder);
      const ScoreRange mine = lesson.scorer.in_document_order(world());
      for (int64_t i = mine.begin; i < mine.end(); ++i)
        EXPECT_NEAR(mine.kl[i - mine.begin], twin[i], 2e-5) << to_string(shape) << " " << i;
    }
  }
  poison_new_buffers(poisoned);
}

// No document has padding, so that ranks have the tokens and columns of the closed form together.
TEST(Teacher, FlopsAreThoseOfTheStepsOfTwoForwardPasses) {
  ModelConfig student = test::small_config(), teacher = teacher_config();
  student.vocab_size = student.vocab_padded = teacher.vocab_size = teacher.vocab_padded = 48;
  teacher.layer_kinds = {{}, {.window = 5}, {}};
  Documents documents;
  for (const int64_t length : {48, 144, 96, 48}) {
    documents.tokens.resize(documents.tokens.size() + length, 7);
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  for (const GridShape& shape : test::all_grids(student)) {
    if (shape.tp > student.num_key_value_heads) continue;  // ranks would share KV heads
    const Lesson lesson(documents, student, teacher, test::setup_of(shape));
    PassWork work = lesson.scorer.work();
    lesson.teacher.add_to(work);
    const double counted = all_reduce_value(
        world(), work.linear_flops + work.attention_flops + work.head_flops, ReduceOp::sum);
    EXPECT_EQ(counted, lesson.plan.flops(student) + lesson.teacher.flops()) << to_string(shape);
  }
}

// The vocabulary is so large that a pass needs most memory while it compares logits.
TEST(Teacher, MemoryOfDivergencesIsThatOfTheClosedForm) {
  ModelConfig student = test::small_config(), teacher = teacher_config();
  student.hidden_size = 96;
  student.vocab_size = student.vocab_padded = teacher.vocab_size = teacher.vocab_padded = 1632;
  const Documents documents = test::ragged_documents(student);
  for (const GridShape& shape : test::all_grids(student)) {
    Lesson lesson(documents, student, teacher, test::setup_of(shape));
    int64_t teacher_alone = 0;  // at its head
    Scorer alone(documents.view(), lesson.of_teacher, lesson.teacher_plan, lesson.grid);
    alone.observe_bins(
        [&](ConstMatrixRef, ConstMatrixRef) {
          teacher_alone = std::max(teacher_alone, memory_use().current_bytes);
        },
        {});
    Scorer(documents.view(), student, lesson.plan, lesson.grid).run(lesson.decoder);
    alone.run(lesson.teacher_decoder);
    reset_memory_peak();
    lesson.scorer.run(lesson.decoder);
    const int64_t bytes = lesson.teacher.bytes();
    EXPECT_EQ(bytes == 0, teacher_alone == 0) << to_string(shape);
    if (bytes == 0) continue;  // a replica without a bin
    EXPECT_NEAR(memory_use().peak_bytes - teacher_alone, bytes, 0.01 * bytes) << to_string(shape);
  }
}

/// FLOPs of both models in the bins of the busiest replica.
double busiest(const ScoringPlan& student, const ScoringPlan& teacher,
               const std::vector<std::vector<int64_t>>& bins_of_replica) {
  double most = 0;
  for (const std::vector<int64_t>& bins : bins_of_replica)
    most =
        std::max(most, std::accumulate(bins.begin(), bins.end(), 0.0, [&](double sum, int64_t bin) {
                   return sum + student.bin_flops[bin] + teacher.bin_flops[bin];
                 }));
  return most;
}

// The student's cost hardly grows with the length of documents, the teacher's does: bins of long
// documents go to different replicas.
TEST(Teacher, ReplicasGetEqualSharesOfTheWorkOfBothModels) {
  ModelConfig student = test::small_config(), teacher = student;
  student.layer_kinds = {{.window = 1}, {.window = 1}};
  teacher.num_attention_heads = 64;
  Documents documents;
  for (const int64_t length : {48, 45, 24, 23, 23, 23}) {
    documents.tokens.resize(documents.tokens.size() + length, 7);
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  ScoringPlan plan = test::plan_of(documents, student, test::setup_of({2, 1, 1}, "contiguous"), 0);
  ASSERT_EQ(plan.bins.size(), 4u);
  const auto alone = plan.bins_of_replica;
  const ScoringPlan of_teacher = plan_teacher(plan, student, teacher, documents.offsets);
  EXPECT_EQ(plan.bins_of_replica, of_teacher.bins_of_replica);
  const double mean = busiest(plan, of_teacher, {{0, 1, 2, 3}}) / 2;
  EXPECT_GT(busiest(plan, of_teacher, alone), 1.1 * mean);
  EXPECT_LT(busiest(plan, of_teacher, plan.bins_of_replica), 1.02 * mean);
}

}  // namespace GYRE_FILE
}  // namespace gyre
