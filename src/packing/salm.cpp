#include "packing/salm.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/error.hpp"
#include "core/index.hpp"
#include "core/label.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

void check_options(const SalmOptions& options) {
  if (options.cp < 1) throw_usage("cp must be at least 1, not {}", options.cp);
  if (options.tp < 1) throw_usage("tp must be at least 1, not {}", options.tp);
  if (options.pad_id == options.placeholder_id)
    throw_usage("id {} is both padding and the placeholder of audio", options.pad_id);
}

void check_sizes(const SalmBatch& batch) {
  if (batch.rows < 1) throw_usage("a batch of {} rows; at least 1 is needed", batch.rows);
  if (batch.hidden < 1) throw_usage("embeddings of {} values; at least 1 is needed", batch.hidden);
  if (batch.ids.empty() || std::ssize(batch.ids) % batch.rows != 0)
    throw_usage("{} ids are not {} rows of equal width", batch.ids.size(), batch.rows);
  if (batch.targets.size() != batch.ids.size())
    throw_usage("{} targets for {} ids", batch.targets.size(), batch.ids.size());
  if (std::ssize(batch.embeddings) != std::ssize(batch.ids) * batch.hidden)
    throw_usage("{} embedding values, but {} ids x {} are {}", batch.embeddings.size(),
                batch.ids.size(), batch.hidden, std::ssize(batch.ids) * batch.hidden);
}

void check_audio(const SalmBatch& batch, const SalmOptions& options) {
  const int64_t width = std::ssize(batch.ids) / batch.rows, given = std::ssize(batch.audio);
  const int64_t wanted = std::count(batch.ids.begin(), batch.ids.end(), options.placeholder_id);
  int64_t seen = 0;
  for (int64_t slot = 0; slot < std::ssize(batch.ids); ++slot)
    if (batch.ids[slot] == options.placeholder_id && seen++ == given)
      throw_usage("row {}, slot {}: no audio for placeholder {} of {}; there are {}", slot / width,
                  slot % width, seen, wanted, given);
  if (given > wanted)
    throw_usage("audio {} has no placeholder: {} audio for {} placeholders", wanted, given, wanted);
  for (size_t k = 0; k < batch.audio.size(); ++k)
    if (batch.audio[k].cols != batch.hidden)
      throw_usage("audio {} has frames of {} values; text embeddings have {}", k,
                  batch.audio[k].cols, batch.hidden);
}

/// Next audio to insert, and the number of frames before it.
struct AudioPlace {
  size_t next = 0;
  int64_t frames = 0;
};

/// Appends one row to `packed`, with frames in place of placeholders and without padding. Advances
/// `audio_place` to the next row. Returns the number of slots appended.
int64_t append_row(SalmPacked& packed, const SalmBatch& batch, const SalmOptions& options,
                   int64_t row, AudioPlace& audio_place) {
  const int64_t width = std::ssize(batch.ids) / batch.rows;
  const auto ids = batch.ids.subspan(row * width, width);
  int64_t first = 0;
  while (first < width - 1 && ids[first] == options.pad_id) ++first;
  const auto begin = packed.labels.size();
  for (int64_t t = first; t < width; ++t) {
    const int64_t id = ids[t], slot = row * width + t;
    if (id == options.placeholder_id) {
      const MatrixView<const float>& audio = batch.audio[audio_place.next++];
      for (int64_t f = 0; f < audio.rows; ++f) {
        packed.embeddings.insert(packed.embeddings.end(), audio.row(f), audio.row(f) + audio.cols);
        packed.sources.push_back(
            static_cast<int32_t>(std::ssize(batch.ids) + audio_place.frames++));
      }
      packed.labels.insert(packed.labels.end(), audio.rows, ignored_label);
      continue;
    }
    const auto text = batch.embeddings.begin() + slot * batch.hidden;
    packed.embeddings.insert(packed.embeddings.end(), text, text + batch.hidden);
    packed.sources.push_back(static_cast<int32_t>(slot));
    packed.labels.push_back(id == options.pad_id ? ignored_label : batch.targets[slot]);
  }
  const int64_t length = packed.labels.size() - begin;
  if (length == 0)
    throw_usage("row {}: its only content is audio of no frames; leave the row out", row);
  // Shift the labels of this row before another row follows.
  packed.labels.erase(packed.labels.begin() + begin);
  packed.labels.push_back(ignored_label);
  return length;
}

/// Fills slots up to `end` of the stream with padding of the last row.
void close_row(SalmPacked& packed, int64_t end) {
  const size_t slots = end;
  packed.embeddings.resize(slots * packed.hidden, 0.0f);
  packed.labels.resize(slots, ignored_label);
  packed.sources.resize(slots, -1);
  for (int64_t position = std::ssize(packed.positions); position < end; ++position)
    packed.positions.push_back(position - packed.cu_seqlens_padded.back());
  packed.seq_lens_padded.push_back(end - packed.cu_seqlens_padded.back());
  packed.cu_seqlens_padded.push_back(static_cast<int32_t>(end));
}

/// Unit to which the total is rounded: a multiple of the row unit, so that the last row stays
/// aligned.
int64_t total_unit(const SalmOptions& options, int64_t row_unit) {
  const int64_t cp = options.cp, tp = options.tp;
  if (cp == 1 || options.rounding == TpRounding::total) return std::lcm(row_unit, tp);
  return std::lcm(row_unit, cp * tp);
}

}  // namespace

SalmPacked pack_salm(const SalmBatch& batch, const SalmOptions& options) {
  check_options(options);
  check_sizes(batch);
  check_audio(batch, options);
  const int64_t row_unit = options.cp == 1 ? 1 : 2 * int64_t{options.cp};
  SalmPacked packed;
  packed.hidden = batch.hidden;
  packed.cu_seqlens = packed.cu_seqlens_padded = {0};
  AudioPlace next_audio;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t length = append_row(packed, batch, options, row, next_audio);
    int64_t end = packed.cu_seqlens_padded.back() + round_up(length, row_unit);
    if (row == batch.rows - 1 && options.tp > 1) end = round_up(end, total_unit(options, row_unit));
    if (end > std::numeric_limits<int32_t>::max())
      throw_usage("row {}: the stream grows to {} slots, more than the int32 range of boundaries",
                  row, end);
    packed.seq_lens.push_back(length);
    packed.cu_seqlens.push_back(packed.cu_seqlens.back() + static_cast<int32_t>(length));
    close_row(packed, end);
  }
  packed.max_seqlen = static_cast<int32_t>(
      *std::max_element(packed.seq_lens_padded.begin(), packed.seq_lens_padded.end()));
  return packed;
}

SalmShard shard_salm(const SalmPacked& packed, const Layout& layout, int rank) {
  if (rank < 0 || rank >= layout.cp())
    throw_usage("rank {} of a layout of {} ranks", rank, layout.cp());
  const size_t slots = layout.shard(rank).slots;
  SalmShard shard;
  shard.embeddings.resize(slots * packed.hidden);
  shard.labels.resize(slots);
  shard.positions.resize(slots);
  shard_rows<float>(layout, rank, packed.embeddings, shard.embeddings, packed.hidden);
  shard_rows<int64_t>(layout, rank, packed.labels, shard.labels, 1, ignored_label);
  shard_rows<int64_t>(layout, rank, packed.positions, shard.positions);
  return shard;
}

}  // namespace gyre
