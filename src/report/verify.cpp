#include "report/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "comm/agree.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {
constexpr double infinity = std::numeric_limits<double>::infinity();
}

void Check::add_failure(const std::string& where) {
  ++count_;
  ++outside_;
  if (max_error_ < infinity) where_ = where;
  max_error_ = infinity;
}

void Check::merge(const Check& other) {
  GYRE_CHECK(other.name_ == name_ && other.tolerance_ == tolerance_,
             "checks {} (tolerance {}) and {} (tolerance {}) cannot be merged", name_, tolerance_,
             other.name_, other.tolerance_);
  count_ += other.count_;
  outside_ += other.outside_;
  if (other.max_error_ > max_error_) {
    max_error_ = other.max_error_;
    where_ = other.where_;
  }
}

double Check::error_over_tolerance() const {
  if (max_error_ == 0) return 0;
  return tolerance_ > 0 ? max_error_ / tolerance_ : infinity;
}

Check& Verification::check(std::string_view name, double tolerance) {
  const double scaled = tolerance * scale_;
  for (Check& check : checks_) {
    if (check.name() != name) continue;
    GYRE_CHECK(check.tolerance() == scaled, "check {} has tolerance {}, not {}", name,
               check.tolerance(), scaled);
    return check;
  }
  return checks_.emplace_back(std::string(name), scaled);
}

void Verification::merge(const Verification& other) {
  for (const Check& theirs : other.checks_) {
    const auto same = [&](const Check& ours) { return ours.name_ == theirs.name_; };
    const auto ours = std::find_if(checks_.begin(), checks_.end(), same);
    if (ours == checks_.end())
      checks_.push_back(theirs);
    else
      ours->merge(theirs);
  }
}

std::string Verification::encode() const {
  nlohmann::json list = nlohmann::json::array();
  for (const Check& c : checks_)
    list.push_back({c.name_, c.tolerance_, c.count_, c.outside_, c.max_error_, c.where_});
  std::string bytes;
  nlohmann::json::to_cbor(list, bytes);  // unlike JSON text, CBOR keeps infinities
  return bytes;
}

void Verification::merge_encoded(std::string_view bytes, int rank) {
  Verification theirs(scale_);
  for (const nlohmann::json& item : nlohmann::json::from_cbor(bytes)) {
    Check check(item[0].get<std::string>(), item[1].get<double>());
    check.count_ = item[2].get<int64_t>();
    check.outside_ = item[3].get<int64_t>();
    check.max_error_ = item[4].get<double>();
    check.where_ = item[5].get<std::string>();
    if (!check.where_.empty()) check.where_ += fmt::format(", rank {}", rank);
    theirs.checks_.push_back(std::move(check));
  }
  merge(theirs);
}

void Verification::merge_over(Communicator& comm) {
  if (comm.size() == 1) return;
  const std::string mine = encode();
  const std::vector<int64_t> bytes = all_gather_value(comm, std::ssize(mine));
  std::string all(static_cast<size_t>(std::accumulate(bytes.begin(), bytes.end(), int64_t{0})),
                  '\0');
  HostStream stream;
  comm.all_gather_v(std::as_bytes(std::span<const char>(mine)),
                    writable_bytes_of(std::span<char>(all)), bytes, stream, "gathering the checks")
      ->wait();
  checks_.clear();
  size_t begin = 0;
  for (int r = 0; r < comm.size(); ++r) {
    const size_t length = static_cast<size_t>(bytes[static_cast<size_t>(r)]);
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

std::string Verification::text() const {
  if (empty()) return "VERIFY SKIPPED\n";
  const auto good = std::count_if(checks_.begin(), checks_.end(),
                                  [](const Check& check) { return check.passed(); });
  std::string text =
      fmt::format("VERIFY {} {}/{} max_err_over_tol={:.3g}\n", passed() ? "PASSED" : "FAILED", good,
                  checks_.size(), max_error_over_tolerance());
  for (const Check& c : checks_) {
    if (c.passed()) continue;
    if (c.count_ == 0)
      text += fmt::format("VERIFY   {}: nothing was compared\n", c.name_);
    else
      text += fmt::format(
          "VERIFY   {}: {} of {} values outside; worst error {:.3g}, tolerance {:.3g}, at {}\n",
          c.name_, c.outside_, c.count_, c.max_error_, c.tolerance_, c.where_);
  }
  return text;
}

}  // namespace gyre
