#pragma once
// The option --emulate-network: messages arrive as late as over a slower link (comm/emulated.hpp).

#include <memory>
#include <string>

#include "core/error.hpp"
#include "harness/backend.hpp"
#include "report/app.hpp"
#include "report/option_table.hpp"
#include "report/options.hpp"

namespace gyre {

/// Adds --emulate-network to the options. `network` gets its text; it is empty without the option.
void declare_network(OptionTable& table, std::string& network);

/// Adds an error if the text does not describe a network, or if the backend sends from GPUs, whose
/// messages cannot be delayed. An empty text has no error.
void check_network(const std::string& network, const BackendOptions& backend, ConfigErrors& errors);

/// Returns a communicator of the backend's ranks that delays messages; null if the text is empty.
/// Collective.
std::unique_ptr<Communicator> make_network(AppContext& context, const std::string& network,
                                           Backend& backend);

/// Says why the figures of a run over an emulated network are not official.
std::string network_reason(const std::string& network);

}  // namespace gyre
