#pragma once
// The arrays of a log-probability problem, below /logprobs, as data: what reads, checks, rounds and
// lists the arrays of a file reads this table. inputs/SCHEMA.md says what each array is.

#include <string>
#include <vector>

#include "io/schemas/logprobs_file.hpp"
#include "logprobs/operations/operation.hpp"

namespace gyre {

struct LogprobsInput {
  enum class Stored { f32, f64, i32, i64 };
  /// Type to which a run rounds the values: that of --dtype, of results (--f32-output), or f32.
  enum class Rounded { logits, outputs, no };
  using Check = void (*)(ConfigErrors& errors, const LogprobsFile& file,
                         const LogprobsInput& input);

  std::string name;
  LogprobsShape shape;  ///< the first input with a letter says what it stands for
  Stored stored = Stored::f32;
  SchemaName::Presence presence = SchemaName::Presence::optional;
  /// Adds an error for the first value that is not right; null: every value is.
  Check check = nullptr;
  std::string set = {};  ///< a file has all inputs of a set or none
  std::string of = {};   ///< the input without which this one means nothing
  Rounded rounded = Rounded::no;
  std::string stand_in = {};      ///< the input whose values are taken where this one is not there
  const RowInput* own = nullptr;  ///< the declaration of an input of single operations

  std::string path() const { return "/logprobs/" + name; }
};

/// All inputs. One that another refers to stands before it.
const std::vector<LogprobsInput>& logprobs_inputs();
/// Requires an input of this name.
const LogprobsInput& logprobs_input(const std::string& name);

/// The input in which a file says how many `letter` stands for; null if every file says it.
const LogprobsInput* input_with_extent(char letter);

/// Names of the inputs that a run must not round, because the dtype cannot represent them exactly.
/// A name whose array is absent has the rounding of its stand-in.
std::set<std::string> rounded_inputs(const LogprobsFile& file, DType logits, DType outputs);

}  // namespace gyre
