#pragma once
// Reports which answers of an input were compared, and why others were not.

#include <string>
#include <vector>

#include "report/result.hpp"

namespace gyre {

/// An array of answers of the input.
struct AnswerUse {
  std::string name;
  std::string why_not = {};  ///< reason; "" if every element was compared
  /// False if the options name other results, so that no comparison is expected.
  bool was_asked = true;
};

/// "# reference by NumPy: compared in full: logprob, entropy; not compared: d_entropy (--pass fwd)"
std::string answers_text(const std::string& generator, const std::vector<AnswerUse>& uses);

/// Makes the result UNVERIFIED if an answer that the options ask for was not compared.
void judge_answers(RunReport& report, const std::vector<AnswerUse>& uses);

}  // namespace gyre
