// The decoder's operations on a device: the suite of every backend.

#include "decoder_ops_cases.hpp"

namespace gyre::test::decoder_ops {
GYRE_RUN_ON(device, DecoderOpsTest);
}  // namespace gyre::test::decoder_ops
