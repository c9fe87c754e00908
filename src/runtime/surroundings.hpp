#pragma once
// What a rank tells the processes around it, and how it asks them to end the run. A program that
// starts none leaves these functions empty; src/supervision sets them.

#include <string_view>

namespace gyre {

/// Phase of a rank. While it runs, its Watchdog knows more than its supervisor.
enum class RankPhase { starting, running, finalising };

struct Surroundings {
  void (*enter)(RankPhase phase) = [](RankPhase) {};
  void (*wait)(std::string_view step, std::string_view waiting_for) = [](std::string_view,
                                                                         std::string_view) {};
  void (*set_timeout)(double seconds) = [](double) {};
  /// Asks the launcher to end all ranks. Returns if it cannot.
  void (*end_run)(int code) = [](int) {};
};

inline Surroundings& surroundings() {
  static Surroundings one;
  return one;
}

}  // namespace gyre
