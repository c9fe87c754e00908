#pragma once
// --emulate-network: messages arrive as late as over a slower link (comm/emulated.hpp).

#include <memory>
#include <string>

#include "core/error.hpp"
#include "harness/backend.hpp"
#include "report/app.hpp"
#include "report/option_table.hpp"
#include "report/options.hpp"

namespace gyre {

void declare_network(OptionTable& table, std::string& network);

/// Adds an error if the text is no network, or if its messages are those of GPUs.
void check_network(const std::string& network, const BackendOptions& backend, ConfigErrors& errors);

/// The network over the backend's ranks; null without --emulate-network. Collective.
std::unique_ptr<Communicator> make_network(AppContext& context, const std::string& network,
                                           Backend& backend);

/// Why the figures of a run over it are not official.
std::string network_reason(const std::string& network);

}  // namespace gyre
