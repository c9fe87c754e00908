#include "predict/relayout_program.hpp"

#include <algorithm>
#include <string>

#include "predict/op_writer.hpp"

namespace gyre {
namespace {

class MovesWriter : OpWriter {
 public:
  MovesWriter(const Programs& programs, int rank, const std::string& name)
      : OpWriter(programs, rank, name) {}

  CompiledRank write(const SlotMoves& moves, int64_t row_bytes) {
    int64_t sent = 0, received = 0, kept = 0;
    for (const SlotMoves::Message& m : moves.sends) sent += std::ssize(m.slots) * row_bytes;
    for (const SlotMoves::Message& m : moves.recvs) received += std::ssize(m.slots) * row_bytes;
    for (const SlotMoves::Move& m : moves.moves) kept += m.length * row_bytes;
    Open open = new_exchange(0);
    copy(2 * sent);
    for (size_t i = 0; i < moves.sends.size(); ++i)
      send(moves.sends[i].peer, std::ssize(moves.sends[i].slots) * row_bytes, static_cast<int>(i),
           open);
    for (const SlotMoves::Message& m : moves.recvs)
      receive(m.peer, std::ssize(m.slots) * row_bytes, open);
    start(open);
    end_step(false);
    copy(2 * kept + std::ssize(moves.filled) * row_bytes);
    end_step(false);
    wait(0);
    copy(2 * received);
    end_step(true);
    return end();
  }
};

}  // namespace

PassPrediction predict_relayout(const std::vector<SlotMoves>& moves, int64_t row_bytes,
                                const MachineModel& machine, GroupPlace place) {
  const std::string name = "change of layout";  // in errors
  Programs programs(Pass::forward, machine, static_cast<int>(moves.size()), place);
  PassPrediction result;
  for (size_t rank = 0; rank < moves.size(); ++rank) {
    programs.add(MovesWriter(programs, static_cast<int>(rank), name).write(moves[rank], row_bytes));
    int64_t bytes = 0;
    for (const SlotMoves::Message& m : moves[rank].sends) bytes += std::ssize(m.slots) * row_bytes;
    result.messages_most = std::max(result.messages_most, std::ssize(moves[rank].sends));
    result.bytes_most = std::max(result.bytes_most, bytes);
  }
  add_times(result, programs, machine, name);
  return result;
}

}  // namespace gyre
