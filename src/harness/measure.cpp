#include <fmt/format.h>

#include <algorithm>

#include "harness/result_array.hpp"
#include "harness/suite.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

class Measurement {
 public:
  Measurement(Case& subject, Pass pass, const MeasureOptions& options, Communicator& world,
              Backend& backend)
      : case_(subject),
        pass_(pass),
        o_(options),
        world_(world),
        backend_(backend),
        checks_(options.tol_scale) {}

  Measured run() {
    if (const std::string step = case_.label(pass_); !step.empty()) set_current_step(step);
    case_.begin(pass_);
    backend_.check_messages(false);
    warm_up();
    case_.start_timing(pass_);
    Repeats repeats(o_.repeats, &world_, !backend_.on_gpu() && case_.computes());
    while (repeats.next()) {
      if (repeats.last()) case_.run_parts(pass_, true);
      const bool verified = o_.check == "all" || (o_.verifies() && repeats.last());
      timed_run(repeats, verified);  // from NaN: what is left unwritten must not look right
      if (checked_) timed_.push_back(*case_.checksum(pass_));
      if (verified) verify();
      if (!repeats.last()) case_.run_parts(pass_, false);
    }
    backend_.check_messages(true);
    Measured result{repeats.timing(), repeats.last_ms(), sent_};
    if (!o_.verifies()) return result;
    compare_bits();
    checks_.merge_over(world_);
    result.checks = std::move(checks_);
    return result;
  }

 private:
  /// Runs whose times are discarded. tests/faults looks for warm_up and timed_run in backtraces.
  [[gnu::noinline]] void warm_up() {
    const int runs = o_.verifies() ? std::max(1, o_.warmup) : o_.warmup;
    if (runs == 0) return;
    for (Repeats repeats({runs}, nullptr); repeats.next();) {
      const bool checked = o_.verifies() && repeats.last();
      backend_.check_messages(checked);
      timed_run(repeats, checked);
      backend_.check_messages(false);
      if (checked) checked_ = case_.checksum(pass_);
      if (checked && !checked_) verify();
      if (repeats.index() < o_.warmup) case_.run_parts(pass_, false);
    }
  }
  /// Times one run after a barrier; all earlier work is complete at the barrier.
  [[gnu::noinline]] void timed_run(Repeats& repeats, bool poisoned) {
    case_.prepare(pass_, poisoned);
    backend_.stream().synchronize();
    HostStream host;
    world_.barrier(host, "before a run")->wait();
    const SentTraffic before = case_.sent();
    repeats.time([&] { case_.run(pass_); });
    sent_ = case_.sent() - before;
    if (o_.verifies()) compare_traffic();
  }
  void compare_traffic() {
    const std::optional<SentTraffic> expected = case_.expected(pass_);
    if (!expected) return;
    Check& check = checks_.check(case_.counters(pass_), 0);
    const auto add = [&](const char* what, int64_t counted, int64_t wanted) {
      check.add(counted, wanted, [&] {
        return fmt::format("rank {}, {}: {} counted, {} expected", world_.rank(), what, counted,
                           wanted);
      });
    };
    add("messages", sent_.messages, expected->messages);
    add("bytes sent", sent_.bytes, expected->bytes);
  }
  void verify() {
    backend_.check_messages(true);
    Verification look(o_.tol_scale);
    case_.verify(pass_, look);
    checks_.merge_repeat(look);
    backend_.check_messages(false);
  }
  void compare_bits() {
    if (!checked_) return;
    const std::string word = case_.run_word(), plural = word.ends_with('s') ? "es" : "s";
    Check& same = check_of(case_.label(pass_), "bits of timed " + word + plural, 0, 1, checks_);
    for (size_t i = 0; i < timed_.size(); ++i) {
      if (timed_[i] == checked_)
        same.add_nothing();
      else
        same.add_failure(fmt::format("rank {}, {} {}: other bits than with checked messages",
                                     world_.rank(), word, i));
    }
  }

  Case& case_;
  Pass pass_;
  const MeasureOptions& o_;
  Communicator& world_;
  Backend& backend_;
  Verification checks_;
  SentTraffic sent_;                 // traffic of the last run
  std::optional<uint64_t> checked_;  // checksum of the run whose messages were checked
  std::vector<uint64_t> timed_;
};

}  // namespace

Measured measure(Case& subject, Pass pass, const MeasureOptions& options, Communicator& world,
                 Backend& backend) {
  return Measurement(subject, pass, options, world, backend).run();
}

}  // namespace gyre
