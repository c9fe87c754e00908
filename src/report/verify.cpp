#include "report/verify.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>
#include <utility>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/json.hpp"
#include "core/tolerance.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {
constexpr double infinity = std::numeric_limits<double>::infinity();

/// ", sampled 64 of 4096 tokens" for the smallest share of any check; "" if none was sampled.
std::string sample_text(const std::deque<Check>& checks) {
  const Check* least = nullptr;
  for (const Check& c : checks)
    if (c.sampled() < c.sampled_of() &&
        (least == nullptr || c.sampled() * least->sampled_of() < least->sampled() * c.sampled_of()))
      least = &c;
  if (least == nullptr) return "";
  return fmt::format(", sampled {} of {} tokens", least->sampled(), least->sampled_of());
}

std::string undefined_text(const std::deque<Check>& checks) {
  int64_t undefined = 0;
  for (const Check& c : checks) undefined += c.undefined();
  return undefined == 0 ? "" : fmt::format(", {} undefined (NaN)", count_text(undefined, "value"));
}

}  // namespace

std::string Deviation::text(double tolerance) const {
  if (!compared) return where;
  const bool is_answer = against == Against::answer_definition;
  const std::string values =
      against == Against::definition
          ? fmt::format("got {:.10g}, expected {:.10g}", got, expected)
          : fmt::format("yours {:.10g}, Gyre's {:.10g}", is_answer ? got : expected,
                        is_answer ? expected : got);
  return fmt::format("{}: {}, error {:.3g}, tolerance {:.3g}", where, values,
                     std::abs(got - expected), tolerance * scale);
}

void Check::keep(Deviation deviation) {
  const auto larger = [](double error, const Deviation& other) { return error > other.error; };
  const auto place =
      std::upper_bound(deviations_.begin(), deviations_.end(), deviation.error, larger);
  deviations_.insert(place, std::move(deviation));
  if (deviations_.size() > max_deviations) deviations_.pop_back();
}

void Check::add_failure(const std::string& where) {
  ++count_;
  ++outside_;
  Deviation failure{where};
  failure.compared = false;
  if (is_among_worst(failure.error)) keep(std::move(failure));
  if (max_error_ < infinity) where_ = where;
  max_error_ = infinity;
}

void Check::require_same(const Check& other) const {
  GYRE_CHECK(other.name_ == name_ && other.tolerance_ == tolerance_ && other.sigma_ == sigma_,
             "checks {} (tolerance {}) and {} (tolerance {}) cannot be merged", name_, tolerance_,
             other.name_, other.tolerance_);
}

void Check::merge(const Check& other) {
  require_same(other);
  count_ += other.count_;
  outside_ += other.outside_;
  undefined_ += other.undefined_;
  add_sample(other.sampled_, other.sampled_of_);
  sizes_ += other.sizes_;
  values_ += other.values_;
  factor_.merge(other.factor_);
  sums_.merge(other.sums_);
  for (const Deviation& deviation : other.deviations_)
    if (is_among_worst(deviation.error)) keep(deviation);
  if (other.max_error_ > max_error_) {
    max_error_ = other.max_error_;
    where_ = other.where_;
  }
}

void Check::merge_repeat(const Check& other) {
  require_same(other);
  const auto badness = [](const Check& check) {
    return std::tuple(check.outside_, check.error_over_tolerance(), check.max_error_, check.count_);
  };
  if (badness(other) > badness(*this)) *this = other;
}

bool Check::is_too_wide() const {
  const double mean = values_ > 0 ? sizes_ / values_ : 0;
  return !std::isfinite(tolerance_) || tolerance_ > std::max(1.0, mean);
}

std::pair<double, std::string> Check::common_error() const {
  std::pair<double, std::string> worst{0, ""};
  if (sigma_ == 0 || sums_.values == 0) return worst;
  const CommonErrors limits = common_error_limits(sigma_, sums_.values, sums_.references);
  const double mean = sums_.errors / sums_.values;
  const double factor = sums_.references > 0 ? 1 + sums_.products / sums_.references : 1;
  const auto consider = [&](double error, double limit, const std::string& text) {
    if (error > worst.first * limit) worst = {error / limit, text};
  };
  const double rms = std::sqrt(sums_.squares / sums_.values);
  consider(rms, limits.rms,
           fmt::format("the rms of all errors is {:.3g}, more than {:.3g}", rms, limits.rms));
  consider(
      std::abs(mean), limits.mean,
      fmt::format("the mean of all errors is {:.3g}, more than {:.3g} from 0", mean, limits.mean));
  consider(std::abs(factor - 1), limits.factor,
           fmt::format("the factor of all values is {:.6g}, more than {:.3g} from 1", factor,
                       limits.factor));
  return worst;
}

std::string Check::fault() const {
  if (count_ == 0) return "nothing was compared";
  if (is_too_wide())
    return fmt::format("a tolerance of {:.3g} is larger than the values: nothing was verified",
                       tolerance_);
  const auto [share, common] = common_error();
  if (outside_ == 0) return share > 1 ? common : "";
  const std::string hint = factor_.hint();
  return fmt::format("{} of {} values outside{}{}", outside_, count_, hint.empty() ? "" : ", ",
                     hint);
}

double Check::error_over_tolerance() const {
  if (!std::isfinite(tolerance_)) return infinity;
  if (max_error_ == 0) return 0;
  return tolerance_ > 0 ? std::max(max_error_ / tolerance_, common_error().first) : infinity;
}

Check& Verification::check(std::string_view name, double tolerance, double sigma) {
  const double scaled = tolerance * scale_;
  for (Check& check : checks_) {
    if (check.name() != name) continue;
    GYRE_CHECK(check.tolerance() == scaled, "check {} has tolerance {}, not {}", name,
               check.tolerance(), scaled);
    return check;
  }
  return checks_.emplace_back(std::string(name), scaled, sigma * scale_);
}

template <class Merge>
void Verification::merge_each(const Verification& other, Merge merge) {
  for (const Check& theirs : other.checks_) {
    const auto same = [&](const Check& ours) { return ours.name_ == theirs.name_; };
    const auto ours = std::find_if(checks_.begin(), checks_.end(), same);
    if (ours == checks_.end())
      checks_.push_back(theirs);
    else
      merge(*ours, theirs);
  }
}

void Verification::merge(const Verification& other) {
  merge_each(other, [](Check& ours, const Check& theirs) { ours.merge(theirs); });
}

void Verification::merge_repeat(const Verification& other) {
  merge_each(other, [](Check& ours, const Check& theirs) { ours.merge_repeat(theirs); });
}

std::string Verification::encode() const {
  Json list = Json::array();
  for (const Check& c : checks_) {
    Json deviations = Json::array();
    for (const Deviation& d : c.deviations_)
      deviations.push_back({d.where, d.error, d.got, d.expected, d.scale, d.compared, d.against});
    list.push_back({c.name_,          c.tolerance_,       c.count_,
                    c.outside_,       c.max_error_,       c.where_,
                    c.sampled_,       c.sampled_of_,      std::move(deviations),
                    c.sizes_,         c.values_,          c.factor_.least(),
                    c.factor_.most(), c.factor_.values(), c.sigma_,
                    c.undefined_,     c.sums_.values,     c.sums_.errors,
                    c.sums_.squares,  c.sums_.products,   c.sums_.references});
  }
  std::string bytes;
  Json::to_cbor(list, bytes);  // unlike JSON text, CBOR keeps infinities
  return bytes;
}

void Verification::merge_encoded(std::string_view bytes, int rank) {
  Verification theirs(scale_);
  const auto place = [&](const Json& where) {
    const auto text = where.get<std::string>();
    return text.empty() ? text : text + fmt::format(", rank {}", rank);
  };
  for (const Json& item : Json::from_cbor(bytes)) {
    Check check(item[0].get<std::string>(), item[1].get<double>(), item[14].get<double>());
    check.count_ = item[2].get<int64_t>();
    check.outside_ = item[3].get<int64_t>();
    check.max_error_ = item[4].get<double>();
    check.where_ = place(item[5]);
    check.sampled_ = item[6].get<int64_t>();
    check.sampled_of_ = item[7].get<int64_t>();
    for (const Json& d : item[8])
      check.deviations_.push_back({place(d[0]), d[1].get<double>(), d[2].get<double>(),
                                   d[3].get<double>(), d[4].get<double>(), d[5].get<bool>(),
                                   d[6].get<Against>()});
    check.sizes_ = item[9].get<double>();
    check.values_ = item[10].get<int64_t>();
    check.factor_ = {item[11].get<double>(), item[12].get<double>(), item[13].get<int64_t>()};
    check.undefined_ = item[15].get<int64_t>();
    const auto sum = [&](size_t i) { return item[i].get<double>(); };
    check.sums_ = {sum(16), sum(17), sum(18), sum(19), sum(20)};
    theirs.checks_.push_back(std::move(check));
  }
  merge(theirs);
}

void Verification::merge_over(Communicator& comm) {
  if (comm.size() == 1) return;
  const std::string mine = encode();
  const std::vector<int64_t> bytes = all_gather_value(comm, std::ssize(mine));
  std::string all(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), '\0');
  HostStream stream;
  comm.all_gather_v(std::as_bytes(std::span<const char>(mine)),
                    writable_bytes_of(std::span<char>(all)), bytes, stream, "gathering the checks")
      ->wait();
  checks_.clear();
  size_t begin = 0;
  for (int r = 0; r < comm.size(); ++r) {
    const size_t length = bytes[r];
    merge_encoded(std::string_view(all).substr(begin, length), r);
    begin += length;
  }
}

bool Verification::passed() const {
  return !empty() && std::all_of(checks_.begin(), checks_.end(),
                                 [](const Check& check) { return check.passed(); });
}

double Verification::max_error_over_tolerance() const {
  double worst = 0;
  for (const Check& check : checks_) worst = std::max(worst, check.error_over_tolerance());
  return worst;
}

std::string Verification::text(size_t most) const {
  if (empty()) return "VERIFY SKIPPED\n";
  const auto good = std::count_if(checks_.begin(), checks_.end(),
                                  [](const Check& check) { return check.passed(); });
  std::string text = fmt::format(
      "VERIFY {} {}/{} max_err_over_tol={:.3g}{}\n", passed() ? "PASSED" : "FAILED", good,
      checks_.size(), max_error_over_tolerance(), sample_text(checks_) + undefined_text(checks_));
  for (const Check& c : checks_) {
    if (c.passed()) continue;
    text += fmt::format("VERIFY   {}: {}\n", c.name_, c.fault());
    for (size_t i = 0; i < std::min(most, c.deviations_.size()); ++i)
      text += fmt::format("VERIFY     {}\n", c.deviations_[i].text(c.tolerance_));
  }
  return text;
}

}  // namespace gyre
