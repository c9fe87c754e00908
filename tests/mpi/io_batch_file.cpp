// Rows of a data loader read by all ranks: with tables of lengths, with one, without; arrays that
// go along, of all numeric types; what is refused.

#include <hdf5.h>

#include <cstring>

#include "io/schemas/batch_file.hpp"
#include "io/schemas/packed_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::input;
using test::on_root;
using test::SharedFolder;
using test::world;

TEST(BatchFile, ReadsRowsWithoutTables) {
  const BshdArrays a = read_bshd(world(), input("golden/rows_without_tables.h5"));
  EXPECT_FALSE(a.seq_lens);
  EXPECT_FALSE(a.seq_lens_padded);
  EXPECT_EQ(a.pad_id, 100);
  EXPECT_EQ(a.rows, 4);
  EXPECT_EQ(std::count(a.ids.begin(), a.ids.end(), 100), 5 + 12);
  EXPECT_TRUE(a.positions.empty() && a.extras.empty());
}

TEST(BatchFile, ReadsTablesWithoutAnIdOfPadding) {
  const BshdArrays a = read_bshd(world(), input("bshd_tiny.h5"));
  ASSERT_TRUE(a.seq_lens && a.seq_lens_padded);
  EXPECT_EQ(std::ssize(*a.seq_lens), a.rows * a.segments_per_row);
  EXPECT_FALSE(a.pad_id);
}

TEST(BatchFile, ReadsExtrasAsTheyLie) {
  const BshdArrays a = read_bshd(world(), input("golden/rows_extras.h5"));
  ASSERT_EQ(a.extras.size(), 5u);
  const StoredExtra &image = a.extras.at("image"), &grid = a.extras.at("grid");
  EXPECT_EQ(image.extra.aligned, Extra::Aligned::slots);
  EXPECT_EQ(image.item, (h5::Shape{2}));
  EXPECT_EQ(image.extra.item_bytes, 4);  // two of float16
  EXPECT_EQ(std::ssize(*image.extra.bytes), 3 * 12 * 4);
  EXPECT_EQ(grid.extra.aligned, Extra::Aligned::none);
  EXPECT_EQ(grid.item, (h5::Shape{2, 3}));
  EXPECT_EQ(std::ssize(*grid.extra.bytes), 2 * 3 * 4);
  // Big-endian numbers below 100 in size: the first three bytes are those of the sign.
  for (size_t i = 0; i < grid.extra.bytes->size(); i += 4)
    EXPECT_EQ((*grid.extra.bytes)[i], (*grid.extra.bytes)[i + 2]);
  EXPECT_EQ(a.extras.at("weight").extra.aligned, Extra::Aligned::rows);
  EXPECT_EQ(a.extras.at("weight").extra.item_bytes, 2);
  EXPECT_FALSE(a.extras.at("weight").type.is_words);
  EXPECT_TRUE(a.extras.at("word").type.is_words);
  EXPECT_EQ(a.extras.at("word").item, (h5::Shape{2}));
  EXPECT_TRUE(image.type == image.type);
  EXPECT_FALSE(image.type == a.extras.at("weight").type) << "float16 is not bfloat16";
}

/// Two rows of three slots; what is written, and how, is told by the fields.
struct Draft {
  bool ids = true, seq_lens = true, seq_lens_padded = true, sentinel = true;
  int64_t pad_id = -1;  ///< below 0: no such attribute
  std::string aligned = "slots";
  h5::Shape extra{};  ///< none: there is no extra
  hid_t type = H5T_STD_I16LE;
};

void write_draft(const std::string& path, const Draft& draft) {
  h5::File file = h5::File::create(path);
  write_schema(file, bshd_schema, {});
  file.create_group("/bshd");
  file.write_attribute("/bshd", "vocab_size", int64_t{10});
  if (draft.sentinel) file.write_attribute("/bshd", "sentinel", int64_t{-1000});
  if (draft.pad_id != -1) file.write_attribute("/bshd", "pad_id", draft.pad_id);
  const std::vector<int64_t> values{1, 2, 0, 3, 0, 0}, real{2, 1}, slots{3, 3};
  const std::vector<float> embeddings(6, 0.5F);
  const auto put = [&](const char* name, const std::vector<int64_t>& array, int64_t columns) {
    file.write_dataset(name, std::span<const int64_t>(array), {2, columns});
  };
  put("/bshd/labels", values, 3);
  if (draft.ids)
    put("/bshd/input_ids", values, 3);
  else
    file.write_dataset("/bshd/inputs_embeds", std::span<const float>(embeddings), {2, 3, 1});
  if (draft.seq_lens) put("/bshd/seq_lens", real, 1);
  if (draft.seq_lens_padded) put("/bshd/seq_lens_padded", slots, 1);
  file.close();
  if (draft.extra.empty()) return;
  test::change_file(path, [&](hid_t again) {
    const char* x = "/bshd/extras/x";
    test::make_dataset(again, x, draft.type, {draft.extra.begin(), draft.extra.end()});
    if (draft.aligned.empty()) return;
    const h5::Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(text.get(), draft.aligned.size());
    test::make_attribute(again, x, "aligned", text.get(), draft.aligned.data());
  });
}

/// Reads a draft whose file `spoil` has changed. Collective.
BshdArrays read_draft(
    const SharedFolder& folder, const Draft& draft,
    const std::function<void(hid_t)>& spoil = [](hid_t) {}) {
  on_root([&] {
    write_draft(folder.file("rows.h5"), draft);
    test::change_file(folder.file("rows.h5"), spoil);
  });
  return read_bshd(world(), folder.file("rows.h5"));
}

TEST(BatchFile, TablesAndTheirSentinelAreOptional) {
  const SharedFolder folder;
  const BshdArrays real = read_draft(folder, {.seq_lens_padded = false});
  EXPECT_EQ(real.seq_lens, (std::vector<int64_t>{2, 1}));
  EXPECT_FALSE(real.seq_lens_padded);
  const BshdArrays none = read_draft(
      folder, {.seq_lens = false, .seq_lens_padded = false, .sentinel = false, .pad_id = 0});
  EXPECT_FALSE(none.seq_lens);
  EXPECT_EQ(none.pad_id, 0);
}

TEST(BatchFile, WrongRowsAreRefused) {
  const SharedFolder folder;
  struct Case {
    std::string message;
    Draft draft;
    std::function<void(hid_t)> spoil = [](hid_t) {};
  };
  const auto extra = [](const std::string& aligned, const h5::Shape& shape,
                        hid_t type = H5T_STD_I16LE) {
    return Draft{.aligned = aligned, .extra = shape, .type = type};
  };
  const auto put_type = [](hid_t file) {
    const h5::Handle type(H5Tcopy(H5T_STD_I64LE), H5Tclose);
    H5Tcommit2(file, "/bshd/seq_lens_padded", type.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  };
  const auto put_padding = [](hid_t file) {
    const int64_t padding = int64_t{1} << 32;
    test::make_attribute(file, "/bshd/extras/x", "padding", H5T_NATIVE_INT64, &padding);
  };
  const h5::Handle pair(H5Tcreate(H5T_COMPOUND, 4), H5Tclose);
  H5Tinsert(pair.get(), "a", 0, H5T_STD_I32LE);
  const std::string x = "dataset '/bshd/extras/x' is ", integers = x + "another integer type ",
                    kinds = "; an extra must be integer, real or an enumeration";
  for (const Case& c : std::vector<Case>{
           {"there is '/bshd/seq_lens_padded' without '/bshd/seq_lens': real lengths are unknown",
            {.seq_lens = false}},
           {"there is neither a dataset '/bshd/seq_lens' nor an attribute 'pad_id' of '/bshd': "
            "padding is unknown",
            {.seq_lens = false, .seq_lens_padded = false}},
           {"there is '/bshd/inputs_embeds' without '/bshd/seq_lens': padding cannot be told from "
            "embeddings",
            {.ids = false, .seq_lens = false, .seq_lens_padded = false}},
           {"'/bshd' has no integer attribute 'sentinel'", {.sentinel = false}},
           {"pad_id of '/bshd' is 10; it must be 0 to 9", {.pad_id = 10}},
           {"pad_id of '/bshd' is -2; it must be 0 to 9", {.pad_id = -2}},
           {"'/bshd/seq_lens_padded' is no dataset; it must be one",
            {.seq_lens_padded = false},
            put_type},
           {"'/bshd/extras' is no group; it must be one",
            {},
            [](hid_t file) { test::make_dataset(file, "/bshd/extras", H5T_STD_I32LE, {}); }},
           {"'/bshd/extras/x' has no text attribute 'aligned'; it must be none, rows or slots",
            extra("", {2})},
           {"'/bshd/extras/x' is aligned to 'tokens'; it must be none, rows or slots",
            extra("tokens", {2})},
           {integers + "[2, 4]; aligned to slots, its extents must begin with [2, 3]",
            extra("slots", {2, 4})},
           {integers + "[2]; aligned to slots, its extents must begin with [2, 3]",
            extra("slots", {2})},
           {integers + "[3]; aligned to rows, its extents must begin with [2]", extra("rows", {3})},
           {integers + "[2, 3, 0]; each extent behind [2, 3] must be at least 1",
            extra("slots", {2, 3, 0})},
           {"attribute 'padding' of '/bshd/extras/x' must be an integer, and the dataset int32 or "
            "int64, little-endian, of slots",
            extra("slots", {2, 3}), put_padding},
           {"attribute 'padding' of '/bshd/extras/x' must be an integer, and the dataset int32 or "
            "int64, little-endian, of slots",
            extra("rows", {2}, H5T_STD_I32LE), put_padding},
           {"attribute 'padding' of '/bshd/extras/x' is 4294967296, which does not fit int32",
            extra("slots", {2, 3}, H5T_STD_I32LE), put_padding},
           {x + "text [2]" + kinds, extra("rows", {2}, H5T_C_S1)},
           {x + "a type that is not read [2]" + kinds, extra("rows", {2}, pair.get())}})
    expect_error(ExitCode::usage, c.message, [&] { read_draft(folder, c.draft, c.spoil); });
}

/// Two segments in 4 slots each, with an extra of every kind of type and alignment.
PackedHeader header_with_extras() {
  PackedHeader header;
  header.documents = 2;
  header.vocab_size = 10;
  header.tokenizer = header.algorithm = "test";
  const std::vector<int64_t> documents{0, 1};
  const std::vector<int32_t> bounds{0, 4, 8};
  header.bins.add_bin(documents, bounds, bounds);
  header.extras = read_bshd(world(), input("golden/rows_extras.h5")).extras;
  return header;
}

TEST(PackedFile, ExtrasComeBackWithTheirTypes) {
  const SharedFolder folder;
  PackedHeader header = header_with_extras();
  const int64_t parts = world().size(), rank = world().rank();
  const int64_t first = 8 * rank / parts, count = 8 * (rank + 1) / parts - first;
  const auto n = static_cast<size_t>(count);
  PackedSlots mine{
      std::vector<int32_t>(n, 1), {}, std::vector<int32_t>(n, 2), std::vector<int32_t>(n, 0), {}};
  for (auto& [name, stored] : header.extras) {
    if (stored.extra.aligned != Extra::Aligned::slots) continue;
    const int64_t width = stored.extra.item_bytes;
    const auto begin = stored.extra.bytes->begin() + first * width;
    mine.extras[name] = {width, {begin, begin + count * width}};
  }
  OutputFile output(world(), folder.file("packed.h5"));
  fill_packed(output, header, mine);
  output.commit();
  const PackedHeader read = read_packed_header(world(), folder.file("packed.h5"));
  const PackedSlots slots = read_packed_slots(world(), folder.file("packed.h5"), read, 0, 1);
  ASSERT_EQ(read.extras.size(), header.extras.size());
  for (const auto& [name, stored] : header.extras) {
    const StoredExtra& back = read.extras.at(name);
    EXPECT_EQ(back.extra.aligned, stored.extra.aligned) << name;
    EXPECT_TRUE(back.type == stored.type) << name;
    EXPECT_EQ(back.item, stored.item) << name;
    if (stored.extra.aligned == Extra::Aligned::slots)
      EXPECT_EQ(std::memcmp(slots.extras.at(name).bytes.data(), stored.extra.bytes->data(),
                            static_cast<size_t>(8 * stored.extra.item_bytes)),
                0)
          << name;
    else
      EXPECT_EQ(*back.extra.bytes, *stored.extra.bytes) << name;
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
