// Every attribute and dataset of every schema, in every state in which it can be wrong, and names
// that no schema has.

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "apps/logprobs/registry.hpp"
#include "io/attention_file.hpp"
#include "io/batch_file.hpp"
#include "io/logprobs_file.hpp"
#include "io/model_file.hpp"
#include "io/packed_file.hpp"
#include "io/results.hpp"
#include "io/schema_names.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre::h5 {
namespace GYRE_FILE {

using test::SharedFolder;

/// An attribute or a dataset of "/a/b@c" or "/a/b/c", and the object that has it.
struct Item {
  explicit Item(const std::string& place)
      : at(place.find_last_of("/@")),
        object(at == 0 || (at == 1 && place[1] == '@') ? "/" : place.substr(0, at)),
        name(place.substr(at + 1)),
        path(place),
        is_attribute(place[at] == '@') {}
  size_t at;
  std::string object, name, path;
  bool is_attribute;
};

/// Type and extents of an item of an open file.
struct Stored {
  Handle type;
  std::vector<hsize_t> extents;
};
Stored stored(hid_t file, const Item& item) {
  Handle object, space;
  Stored result;
  if (item.is_attribute) {
    object = Handle(
        H5Aopen_by_name(file, item.object.c_str(), item.name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
        H5Aclose);
    result.type = Handle(H5Aget_type(object.get()), H5Tclose);
    space = Handle(H5Aget_space(object.get()), H5Sclose);
  } else {
    object = Handle(H5Dopen2(file, item.path.c_str(), H5P_DEFAULT), H5Dclose);
    result.type = Handle(H5Dget_type(object.get()), H5Tclose);
    space = Handle(H5Dget_space(object.get()), H5Sclose);
  }
  result.extents.resize(static_cast<size_t>(H5Sget_simple_extent_ndims(space.get())));
  H5Sget_simple_extent_dims(space.get(), result.extents.data(), nullptr);
  return result;
}

void remove(hid_t file, const Item& item) {
  if (item.is_attribute)
    H5Adelete_by_name(file, item.object.c_str(), item.name.c_str(), H5P_DEFAULT);
  else
    H5Ldelete(file, item.path.c_str(), H5P_DEFAULT);
}

/// Zeros, or texts without a letter.
void put(hid_t file, const Item& item, bool as_attribute, hid_t type, hid_t space) {
  const std::string path = (item.object == "/" ? "" : item.object) + "/" + item.name;
  const Handle made =
      as_attribute ? Handle(H5Acreate_by_name(file, item.object.c_str(), item.name.c_str(), type,
                                              space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                            H5Aclose)
                   : Handle(H5Dcreate2(file, path.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT,
                                       H5P_DEFAULT),
                            H5Dclose);
  ASSERT_TRUE(made.valid()) << item.path;
  if (!as_attribute || H5Sget_simple_extent_npoints(space) == 0) return;
  const std::vector<char> zeros(4096, '\0');
  H5Awrite(made.get(), type, zeros.data());
}

/// Puts an item of this type and these extents in the place of what is there.
void replace(hid_t file, const Item& item, hid_t type, const std::vector<hsize_t>& extents) {
  const Handle space(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
                     H5Sclose);
  remove(file, item);
  put(file, item, item.is_attribute, type, space.get());
}

/// What an item can be instead of right.
const std::map<std::string, std::function<void(hid_t, const Item&)>>& wrong_states() {
  static const std::map<std::string, std::function<void(hid_t, const Item&)>> states{
      {"text, or a number for a text",
       [](hid_t file, const Item& item) {
         const Stored was = stored(file, item);
         const Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
         const bool is_text = H5Tget_class(was.type.get()) == H5T_STRING;
         replace(file, item, is_text ? H5T_STD_I64LE : text.get(), was.extents);
       }},
      {"a type between",
       [](hid_t file, const Item& item) {
         const Stored was = stored(file, item);
         const bool is_real = H5Tget_class(was.type.get()) == H5T_FLOAT;
         const Handle truth(H5Tenum_create(H5T_STD_I8LE), H5Tclose);
         for (const auto& [name, value] : {std::pair<const char*, int8_t>{"FALSE", 0}, {"TRUE", 1}})
           H5Tenum_insert(truth.get(), name, &value);
         replace(file, item, is_real ? truth.get() : H5T_IEEE_F64LE, was.extents);
       }},
      {"of another rank",
       [](hid_t file, const Item& item) {
         Stored was = stored(file, item);
         was.extents.push_back(item.is_attribute ? 2 : 1);
         replace(file, item, was.type.get(), was.extents);
       }},
      {"larger",
       [](hid_t file, const Item& item) {
         Stored was = stored(file, item);
         if (item.is_attribute) was.extents = {3};
         for (hsize_t& extent : was.extents) ++extent;
         replace(file, item, was.type.get(), was.extents);
       }},
      {"empty",
       [](hid_t file, const Item& item) {
         const Stored was = stored(file, item);
         replace(file, item, was.type.get(), std::vector<hsize_t>(was.extents.size() + 1, 0));
       }},
      {"without a shape",
       [](hid_t file, const Item& item) {
         const Stored was = stored(file, item);
         const Handle null(H5Screate(H5S_NULL), H5Sclose);
         remove(file, item);
         put(file, item, item.is_attribute, was.type.get(), null.get());
       }},
      {"a dataset for an attribute, or an attribute for a dataset",
       [](hid_t file, const Item& item) {
         const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
         remove(file, item);
         put(file, item, !item.is_attribute, H5T_STD_I64LE, scalar.get());
       }},
      {"a group",
       [](hid_t file, const Item& item) {
         remove(file, item);
         const std::string path = (item.object == "/" ? "" : item.object) + "/" + item.name;
         const Handle group(H5Gcreate2(file, path.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                            H5Gclose);
       }},
  };
  return states;
}

using Read = std::function<void(const std::string& path)>;

/// A right file, all of whose items are read by `read`.
struct Sample {
  std::string path, schema;
  Read read;
};

/// Trees of documents with names, as gyre-pack --share-prefixes writes them (inputs/SCHEMA.md), of
/// ids, or of embeddings of `width`.
void write_packed_sample(const std::string& path, int64_t width) {
  PackedHeader header;
  header.bins = {12, {0, 1}, {0}, {0, 11}, {0, 12}, {}};
  header.bins.prefixes = {
      {0, 4}, {{-1, 4, 0, 3}, {0, 3, 0, 2}, {1, 2, 1, 1}, {0, 2, 2, 1}}, {0, 2, 1}};
  header.slot_multiple = 4, header.documents = 1, header.vocab_size = 9;
  header.tokenizer = header.algorithm = "test";
  header.names = {"a", "b", "c"};
  PackedSlots slots;
  slots.labels = slots.positions = std::vector<int32_t>(12, 1);
  if (width == 0) slots.ids = slots.labels;
  slots.embeddings.resize(static_cast<size_t>(12 * width), 1);
  header.hidden_size = width;
  OutputFile output(test::world(), path);
  fill_packed(output, header, slots);
  output.commit();
}

void write_results_sample(const std::string& path) {
  ResultsHeader header;
  header.model_sha256 = header.input_sha256 = "x";
  header.offsets = {0, 4, 4};
  header.names = {"a", "b"};
  header.packed = {12, {0, 1}, {0}, {0, 11}, {0, 12}, {}};
  header.packed.prefixes = {{0, 1}, {{-1, 11, 0, 2}}, {0, 1}};
  const std::vector<float> values(4, -1);
  const std::vector<ResultPiece> pieces{{0, values, values}};
  OutputFile output(test::world(), path);
  write_results(output, header, pieces);
  output.commit();
}

void read_packed(const std::string& path) {
  const PackedHeader header = read_packed_header(test::world(), path);
  (void)read_packed_slots(test::world(), path, header, 0, header.bin_count());
}

void read_with_reference(const std::string& path) {
  const Documents documents = read_documents(test::world(), path);
  (void)read_reference(test::world(), path, documents, {3, 48});
}

std::vector<Sample> samples(const SharedFolder& folder) {
  write_packed_sample(folder.file("packed.h5"), 0);
  write_packed_sample(folder.file("embeddings.h5"), 2);
  write_results_sample(folder.file("results.h5"));
  const Read rows = [](const std::string& path) { (void)read_bshd(test::world(), path); };
  const Read attention = [](const std::string& path) {
    (void)read_attention_file(test::world(), path);
  };
  const Read logprobs = [](const std::string& path) {
    (void)read_logprobs_file(test::world(), path, logprobs_arrays());
  };
  const auto input = [](const char* name) { return test::input(name); };
  return {
      {input("docs_tiny.h5"), documents_schema, read_with_reference},
      {input("model_tiny.h5"), model_schema,
       [](const std::string& path) { ModelFile(test::world(), path); }},
      {folder.file("results.h5"), results_schema,
       [](const std::string& path) { (void)read_results(test::world(), path); }},
      {folder.file("packed.h5"), packed_schema, read_packed},
      {folder.file("embeddings.h5"), packed_schema, read_packed},
      {input("bshd_tiny.h5"), bshd_schema, rows},
      {input("bshd_left.h5"), bshd_schema, rows},
      {input("golden/rows_padded.h5"), bshd_schema, rows},
      {input("salm_tiny.h5"), salm_schema,
       [](const std::string& path) { (void)read_salm(test::world(), path); }},
      {input("golden/attention_window_sinks.h5"), attention_schema, attention},
      {input("attention_regions.h5"), attention_schema, attention},
      {input("logprobs_golden.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_fused_linear.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_teacher_values.h5"), logprobs_schema, logprobs},
      {input("golden/logprobs_every_id.h5"), logprobs_schema, logprobs},
  };
}

/// Names of a schema, those of the answers included. content_sha256 is of another test.
std::vector<SchemaName> names_of(const std::string& schema) {
  std::vector<SchemaName> names;
  for (const SchemaName& name : names_of_schema(schema))
    if (!name.place.ends_with("/*") && name.place != std::string("/@") + "content_sha256")
      names.push_back(name);
  if (schema == logprobs_schema)
    for (const LogprobsArray& array : logprobs_arrays())
      names.push_back({"/reference/" + array.name, SchemaName::Presence::optional});
  return names;
}

/// A copy of `sample` without its digest, changed.
void make(const Sample& sample, const std::string& path, const std::function<void(hid_t)>& change) {
  std::filesystem::copy_file(sample.path, path, std::filesystem::copy_options::overwrite_existing);
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
  H5Adelete(file.get(), "content_sha256");
  change(file.get());
}

bool is_in(hid_t file, const Item& item) {
  if (item.is_attribute)
    return H5Lexists(file, item.object.c_str(), H5P_DEFAULT) >= 0 &&
           H5Aexists_by_name(file, item.object.c_str(), item.name.c_str(), H5P_DEFAULT) > 0;
  return H5Oexists_by_name(file, item.object.c_str(), H5P_DEFAULT) > 0 &&
         H5Lexists(file, item.path.c_str(), H5P_DEFAULT) > 0;
}

/// The usage error, or what was wrong with it.
std::string refusal(const Sample& sample, const std::string& path) {
  try {
    sample.read(path);
  } catch (const Error& error) {
    return error.code() == ExitCode::usage ? error.what() : "(no usage error)";
  }
  return "(accepted)";
}

/// The refusal of a sample whose items are all spoiled at once.
std::string refusal_of(const Sample& sample, const std::string& path,
                       const std::vector<SchemaName>& names,
                       const std::function<void(hid_t, const Item&)>& spoil) {
  make(sample, path, [&](hid_t file) {
    for (const SchemaName& name : names) spoil(file, Item(name.place));
  });
  return refusal(sample, path);
}

/// Attributes of one object, and answers, are read together: an error lists all of them.
std::string group_of(const SchemaName& name) {
  const Item item(name.place);
  if (item.object == "/reference") return item.is_attribute ? "/reference@" : "/reference/";
  return item.is_attribute && item.object != "/" ? item.object + "@" : name.place;
}

TEST(Schemas, EveryItemInEveryState) {
  const SharedFolder folder;
  const std::string path = folder.file("x.h5");
  std::set<std::string> seen;
  std::vector<std::string> notes;
  set_note_handler([&](const std::string& note) { notes.push_back(note); });
  const std::vector<Sample> all = samples(folder);
  for (const Sample& sample : all) {
    std::map<std::string, std::vector<SchemaName>> groups;
    make(sample, path, [&](hid_t file) {
      for (const SchemaName& name : names_of(sample.schema))
        if (is_in(file, Item(name.place)) && seen.insert(sample.schema + name.place).second)
          groups[group_of(name)].push_back(name);
    });
    EXPECT_EQ(refusal(sample, path), "(accepted)") << sample.path;
    for (const auto& [group, names] : groups) {
      for (const SchemaName& name : names) {
        if (name.presence == SchemaName::Presence::depends) continue;
        const std::string missing = refusal_of(sample, path, {name}, remove);
        EXPECT_EQ(missing == "(accepted)", name.presence == SchemaName::Presence::optional)
            << sample.path << ", without " << name.place << ": " << missing;
      }
      for (const auto& [state, spoil] : wrong_states()) {
        const std::string message = refusal_of(sample, path, names, spoil);
        // A dataset of another size may be what others are held against.
        const bool gives_sizes = state == "larger" || state == "without a shape";
        for (const SchemaName& name : names)
          EXPECT_TRUE(message.find(path) != std::string::npos &&
                      (message.find(Item(name.place).name) != std::string::npos ||
                       (gives_sizes && message.find("dataset '/") != std::string::npos)))
              << sample.path << ", " << name.place << " is " << state << ": " << message;
      }
    }
  }
  set_note_handler({});
  EXPECT_EQ(notes, std::vector<std::string>{}) << "of names that are right, or refused";
  for (const Sample& sample : all)
    for (const SchemaName& name : names_of(sample.schema))
      EXPECT_TRUE(seen.contains(sample.schema + name.place))
          << "no sample of " << sample.schema << " has " << name.place;
}

/// What check_names() says of a file, with "X" for its name: notes, or the lines of the error.
std::vector<std::string> said_of(const std::string& path, const std::vector<std::string>& more) {
  std::vector<std::string> lines;
  set_note_handler(
      [&](const std::string& note) { lines.push_back("X" + note.substr(path.size())); });
  try {
    const File file = File::open(path);
    check_names(file, std::get<std::string>(file.attribute("/", "schema")), more);
  } catch (const Error& error) {
    const std::string text = error.what();
    for (size_t at = text.find("\n  - "); at != std::string::npos;) {
      const size_t next = text.find("\n  - ", at + 1);
      lines.push_back(text.substr(at + 5, next - at - 5));
      at = next;
    }
  }
  set_note_handler({});
  return lines;
}

TEST(Schemas, NothingIsSaidOfTheInputs) {
  std::vector<std::string> answers;
  for (const LogprobsArray& array : logprobs_arrays())
    answers.push_back("/reference/" + array.name);
  for (const char* folder : {"", "golden"})
    for (const auto& entry : std::filesystem::directory_iterator(test::input(folder)))
      if (entry.path().extension() == ".h5") {
        EXPECT_EQ(said_of(entry.path(), answers), std::vector<std::string>{}) << entry.path();
      }
}

TEST(Schemas, OtherNamesAreNotedAndModifiersRefused) {
  const SharedFolder folder;
  const std::string path = folder.file("x.h5");
  const Sample sample{test::input("golden/attention_causal.h5"), attention_schema, {}};
  const auto add = [](const std::string& place, double value) {
    return [=](hid_t file) {
      const Item item(place);
      const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
      put(file, item, item.is_attribute, H5T_IEEE_F64LE, scalar.get());
      if (!item.is_attribute) return;
      const Handle made(
          H5Aopen_by_name(file, item.object.c_str(), item.name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
          H5Aclose);
      H5Awrite(made.get(), H5T_NATIVE_DOUBLE, &value);
    };
  };
  const auto expect = [&](const std::function<void(hid_t)>& change, const std::string& line) {
    make(sample, path, change);
    EXPECT_EQ(said_of(path, {}), std::vector<std::string>{line});
  };
  const std::string refused = "changes what is computed, and is not read; leave it out";
  expect(add("/attention@softcap", 5), "attribute 'softcap' of '/attention' is 5: it " + refused);
  expect(add("/attention@softcap", 0), "X: attribute 'softcap' of '/attention' is not read");
  expect(add("/attention/alibi_slopes", 0), "'/attention/alibi_slopes' " + refused);
  expect(add("/@Temperature", 2), "attribute 'Temperature' of '/' is 2: it " + refused);
  expect(add("/@window", 4),
         "attribute 'window' of '/' is 4: it " + refused + " (did you mean /attention@window?)");
  expect(add("/attention/q@units", 1), "X: attribute 'units' of '/attention/q' is not read");
  expect(add("/more", 1), "X: '/more' is not read");
  expect(add("/attention/ofsets", 1),
         "X: '/attention/ofsets' is not read (did you mean /attention/offsets?)");
  make(sample, path, [&](hid_t file) {
    for (int i = 10; i < 20; ++i) add(fmt::format("/attention@zzz{}", i), 1)(file);
  });
  const std::vector<std::string> many = said_of(path, {});
  ASSERT_EQ(many.size(), 9U);
  EXPECT_EQ(many.back(), "X: 2 more names are not read");
}

}  // namespace GYRE_FILE
}  // namespace gyre::h5
