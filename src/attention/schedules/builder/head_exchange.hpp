#pragma once
// Exchange of tokens for heads within a group of ranks, as steps of a plan. sharding/heads.hpp
// defines the heads of each rank.
//
//     q, kv, d_out          [own tokens, all heads]    ->  [tokens of the group, own heads]
//     out, d_q, d_kv        [tokens of the group, own heads]  ->  [own tokens, all heads]
//
// A KV head that several ranks read is sent to each, and their gradients are added in rank order.

#include <array>
#include <string>
#include <vector>

#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Exchanges tokens for heads (see the file head). Makes the arrays of all tokens of these ranks,
/// in the order of the packed stream, with this rank's heads. In a group of one rank nothing is
/// exchanged and the arrays are the rank's own.
class HeadExchange {
 public:
  /// `ranks`: the group, including this rank.
  HeadExchange(PlanBuilder& plan, std::vector<int> ranks);

  const ArraySet& arrays() const { return set_; }

  /// Appends the exchanges before and after the attention of one pass.
  void before_forward();
  void after_forward();
  void before_backward();
  void after_backward();

 private:
  /// Rows of a member's own arrays, and their rows in the exchanged arrays.
  struct Piece {
    int64_t slot = 0, row = 0, length = 0;
  };
  const std::vector<Piece>& pieces(ArrayKind kind, int64_t member) const {
    return pieces_.at(has_keys(kind) ? 1 : 0).at(member);
  }
  int members() const { return static_cast<int>(ranks_.size()); }
  HeadRange heads_of(ArrayKind kind, int member) const;
  bool replicated() const;
  /// Adds the slices that exchange tokens of the own array of `kind` for heads in `array`.
  void there(ArrayKind kind, int array, std::vector<Message>& sends,
             std::vector<Message>& recvs) const;
  void back(ArrayKind kind, int array, bool add, std::vector<Message>& sends,
            std::vector<Message>& recvs) const;
  std::vector<Message> messages() const;
  /// Exchanges by messages, or by the library's all-to-all.
  int exchange(std::string what, std::vector<Message> sends, std::vector<Message> recvs) const;

  PlanBuilder& plan_;
  std::vector<int> ranks_;                                 // [members]
  int mine_ = 0;                                           // index of this rank in ranks_
  std::array<std::vector<std::vector<Piece>>, 2> pieces_;  // of queries, of keys: [members]
  ArraySet set_;
};

/// Closed form of one pass of a head exchange in groups of `inner` consecutive ranks, with a ring
/// of cp / inner blocks, each with the rows of one group.
ClosedForm head_exchange_form(const FormContext& c, int inner);

}  // namespace gyre
