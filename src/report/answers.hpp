#pragma once
// Reports which answers of an input were compared, and why others were not.

#include <string>
#include <vector>

#include "report/result.hpp"

namespace gyre {

/// An array of answers of the input.
struct AnswerUse {
  std::string name;
  std::string why_not = {};  ///< ""; it was compared, every element
  /// False: the options ask for other results by name, so that nobody expects it to be compared.
  bool was_asked = true;
};

/// "# reference by NumPy: compared in full: logprob, entropy; not compared: d_entropy (--pass fwd)"
std::string answers_text(const std::string& generator, const std::vector<AnswerUse>& uses);

/// Makes the result UNVERIFIED if answers were not compared that the options ask for.
void judge_answers(RunReport& report, const std::vector<AnswerUse>& uses);

}  // namespace gyre
