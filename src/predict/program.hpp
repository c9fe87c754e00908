#pragma once
// The cost of a rank's plan on a machine, as a program of a few kinds of operations.
//
//     step of the plan                       operations
//     Exchange                               spend (packing), send ..., receive ...
//     Exchange: all-gather, reduce-scatter   spend (packing), join
//     Wait                                   wait, spend (unpacking, adding)
//     Compute, Clear, Delta                  spend
//
// A program is a sequence of blocks. A block ends after a Wait; the last one ends with the plan.
// Operations name a peer by its distance from the rank, so that ranks have equal blocks. Equal
// blocks are stored once: a ring over n ranks has n² steps but only a few distinct blocks. One
// process can simulate thousands of ranks.

#include <array>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "attention/plan.hpp"
#include "predict/collective_model.hpp"
#include "predict/machine.hpp"
#include "runtime/trace.hpp"

namespace gyre {

/// Place of a context-parallel group on the machine: its rank r is the machine's rank first + r ·
/// stride.
struct GroupPlace {
  int64_t first = 0, stride = 1;
};

enum class OpKind : uint8_t { spend, send, receive, join, wait };

struct Op {
  OpKind kind = OpKind::spend;
  SpanKind spends = SpanKind::compute;                        ///< spend: on what
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;  ///< join: of the library
  int16_t tier = 0;                                           ///< send, join: tier of the link
  int16_t exchange = 0;  ///< send, receive, join, wait: which of the rank's open exchanges
  int32_t step = 0;      ///< index into the plan's steps, relative to the block's first step
  int32_t hop = 0;       ///< send, receive: (peer - rank) modulo the ranks
  int32_t message = 0;   ///< send: index into the step's sends
  int32_t group = 0;     ///< join: number of ranks of the group; its first rank is a multiple of it
  double seconds = 0;    ///< spend; send: link occupation; join: from the last rank's arrival
  double slowed = 0;     ///< spend: the part of `seconds` that a kernel loses to transfers
  int64_t bytes = 0;     ///< send, receive: of the message; join: to each other rank
  friend bool operator==(const Op&, const Op&) = default;
};

/// Distinct blocks, each kept once.
class BlockTable {
 public:
  struct Block {
    std::vector<Op> ops;
    int32_t steps = 0;
    friend bool operator==(const Block&, const Block&) = default;
  };
  /// Index of an equal block, which is added if there is none.
  uint32_t index_of(const Block& block);
  const Block& at(uint32_t index) const { return blocks_[index]; }
  size_t size() const { return blocks_.size(); }

 private:
  std::vector<Block> blocks_;
  std::unordered_multimap<uint64_t, uint32_t> by_hash_;
};

/// Program of one rank in one direction.
struct RankProgram {
  struct Part {
    uint32_t block = 0, times = 0;  ///< the block runs this many times in a row
  };
  std::vector<Part> parts;
};

/// Costs that are known without running the program.
struct ProgramCost {
  double kernel = 0;                               ///< kernel seconds without concurrent transfers
  double extrapolated = 0;                         ///< kernel seconds outside measured sizes
  std::array<int64_t, max_tiers> bytes_sent = {};  ///< [tier]
  /// Algorithms of the library's collectives; empty without collectives.
  std::set<CollectiveAlgorithm> algorithms;
};

/// A program with its own blocks.
struct CompiledRank {
  BlockTable blocks;
  RankProgram program;
  ProgramCost cost;
};

/// The programs of all ranks in one direction.
class Programs {
 public:
  Programs(Pass pass, const HeadShape& heads, const ElementTypes& types,
           const MachineModel& machine, int ranks, GroupPlace place = {});
  /// Holds programs that recurrence_program.hpp compiles, which need no heads and no types.
  Programs(Pass pass, const MachineModel& machine, int ranks, GroupPlace place)
      : Programs(pass, {}, {}, machine, ranks, place) {}

  /// Compiles a rank's plan. Throws a runtime error that names rank and step if the plan waits for
  /// an exchange that is not open, never waits for an exchange, or exchanges with a rank that does
  /// not exist. Several threads may compile at once.
  CompiledRank compile(const RankPlan& plan, const std::string& schedule) const;
  /// Adds the next rank, in order.
  void add(const CompiledRank& rank);

  const BlockTable::Block& block(uint32_t index) const { return blocks_.at(index); }
  const RankProgram& rank(int r) const { return programs_[r]; }
  const ProgramCost& cost(int r) const { return costs_[r]; }
  int ranks() const { return ranks_; }
  Pass pass() const { return pass_; }
  size_t blocks() const { return blocks_.size(); }

 private:
  friend class OpWriter;
  friend class ProgramWriter;

  Pass pass_;
  HeadShape heads_;
  ElementTypes types_;
  const MachineModel& machine_;
  int ranks_;
  GroupPlace place_;
  BlockTable blocks_;
  std::vector<RankProgram> programs_;
  std::vector<ProgramCost> costs_;
};

}  // namespace gyre
