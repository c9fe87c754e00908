// Every attribute and dataset of every schema, in every state in which it can be wrong, and names
// that no schema has.

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "io/schemas/schema_names.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"
#include "schema_samples.hpp"

namespace gyre::h5 {
namespace GYRE_FILE {

using test::Sample;
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
  result.extents.resize(H5Sget_simple_extent_ndims(space.get()));
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
         const Handle truth = test::make_enumeration({"FALSE", "TRUE"});
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

/// Names of a schema, with those of answers and of a model's tensors. content_sha256 is of another
/// test; attributes of compared results are read by nobody, and their datasets are all expected.
std::vector<SchemaName> names_of(const std::string& schema) {
  using Presence = SchemaName::Presence;
  const bool is_compared = schema.ends_with("-results");
  std::vector<SchemaName> names;
  for (SchemaName name : names_of_schema(schema)) {
    if (name.place.ends_with("/*") || name.place == "/@content_sha256") continue;
    if (is_compared && name.place.starts_with("/results@")) continue;
    if (is_compared) name.presence = Presence::required;
    names.push_back(name);
  }
  if (schema == logprobs_schema)
    for (const LogprobsArray& array : logprobs_arrays())
      names.push_back({"/reference/" + array.name, Presence::optional});
  if (schema == logprobs_results_schema) names.push_back({"/results/logprob"});
  if (schema == model_schema)
    for (const std::string& tensor :
         File::open(test::input("model_tiny.h5")).datasets_below("/model"))
      names.push_back({"/model/" + tensor});
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

/// Whether a line of an error says what is wrong with an item.
bool says(const std::string& message, const Item& item) {
  const auto has = [&](const std::string& text) { return message.find(text) != std::string::npos; };
  const std::string& path = item.path;
  if (!item.is_attribute)
    return has(fmt::format("dataset '{}'", path)) || has(fmt::format("'{}' is no dataset", path)) ||
           has(fmt::format("'{}' must be a dataset", path));
  const std::string owner = item.object == "/" ? "" : fmt::format("'{}' ", item.object);
  for (const char* type : {"text", "integer", "real"})
    if (has(fmt::format("{}has no {} attribute '{}'", owner, type, item.name))) return true;
  return has(fmt::format("attribute '{}' of '{}'", item.name, item.object)) ||
         has(fmt::format("'{}' must be an attribute of '{}'", item.name, item.object));
}

/// Spoils all of `names` at once, then those of which the error said nothing, and so on, since a
/// reader lists what it finds together. Returns those of which no error says anything.
std::vector<SchemaName> unsaid(const Sample& sample, const std::string& path,
                               std::vector<SchemaName> names,
                               const std::function<void(hid_t, const Item&)>& spoil) {
  for (size_t before = 0; names.size() != before;) {
    before = names.size();
    const std::string message = names.empty() ? "" : refusal_of(sample, path, names, spoil);
    std::erase_if(names, [&](const SchemaName& name) { return says(message, Item(name.place)); });
  }
  return names;
}

void expect_refusals(const Sample& sample, const std::string& path,
                     const std::vector<SchemaName>& names) {
  std::vector<SchemaName> required;
  for (const SchemaName& name : names) {
    if (name.presence == SchemaName::Presence::required) required.push_back(name);
    if (name.presence != SchemaName::Presence::optional) continue;
    EXPECT_EQ(refusal_of(sample, path, {name}, remove), "(accepted)")
        << sample.path << ", without " << name.place;
  }
  for (const SchemaName& name : unsaid(sample, path, required, remove))
    ADD_FAILURE() << sample.path << ", without " << name.place << ": "
                  << refusal_of(sample, path, {name}, remove);
  for (const auto& [state, spoil] : wrong_states())
    for (const SchemaName& name : unsaid(sample, path, names, spoil)) {
      const std::string message = refusal_of(sample, path, {name}, spoil);
      const auto has = [&](const std::string& text) {
        return message.find(text) != std::string::npos;
      };
      // Numbers of all rows are an attribute, those of each row the dataset of that name.
      const Item item(name.place);
      const auto& all = names_of_schema(sample.schema);
      const std::string other =
          fmt::format("{}{}{}", item.object, item.is_attribute ? "/" : "@", item.name);
      if (message == "(accepted)" && state.starts_with("a dataset for an attribute") &&
          std::ranges::any_of(all, [&](const SchemaName& one) { return one.place == other; }))
        continue;
      // A dataset of another size may be what others are held against.
      const bool gives_sizes = state == "larger" || state == "without a shape";
      EXPECT_TRUE(has(path) && (has(Item(name.place).name) || (gives_sizes && has("dataset '/"))))
          << sample.path << ", " << name.place << " is " << state << ": " << message;
    }
}

/// Names that all schemas have are read by the same lines.
std::string key_of(const Sample& sample, const SchemaName& name) {
  return (name.place.starts_with("/@") ? "" : sample.schema) + name.place;
}

TEST(Schemas, EveryItemInEveryState) {
  const SharedFolder folder;
  const std::string path = folder.file("x.h5");
  std::set<std::string> seen;
  std::vector<std::string> notes;
  set_note_handler([&](const std::string& note) { notes.push_back(note); });
  const std::vector<Sample> all = test::samples(folder);
  for (const Sample& sample : all) {
    std::vector<SchemaName> names;
    make(sample, path, [&](hid_t file) {
      for (const SchemaName& name : names_of(sample.schema))
        if (is_in(file, Item(name.place)) && seen.insert(key_of(sample, name)).second)
          names.push_back(name);
    });
    EXPECT_EQ(refusal(sample, path), "(accepted)") << sample.path;
    expect_refusals(sample, path, names);
  }
  set_note_handler({});
  // A model's reader misses a tensor that is an attribute, whatever the attribute may be.
  std::erase_if(notes, [](const std::string& note) { return note.find("'/model") != note.npos; });
  EXPECT_EQ(notes, std::vector<std::string>{}) << "of names that are right, or refused";
  for (const Sample& sample : all)
    for (const SchemaName& name : names_of(sample.schema))
      EXPECT_TRUE(seen.contains(key_of(sample, name)))
          << "no sample of " << sample.schema << " has " << name.place;
}

TEST(Schemas, ShardsHaveTheHeaderThatTheirReaderKnows) {
  const SharedFolder folder;
  const Sample sample = test::shards_sample(folder.file("shards.h5"), 0);
  const auto refusal_with = [&](const char* place, const std::vector<hsize_t>& extents) {
    make(sample, folder.file("x.h5"),
         [&](hid_t file) { replace(file, Item(place), H5T_STD_I64LE, extents); });
    return refusal(sample, folder.file("x.h5"));
  };
  for (const auto& [place, extents, text] :
       {std::tuple<const char*, std::vector<hsize_t>, const char*>{
            "/shards@cp", {}, "cp of '/shards' is 0; it must be 2"},
        {"/shards@hidden_size", {}, "(accepted)"},
        {"/shards/bin_offsets", {2}, "/shards/bin_offsets[1] is 0; it must be 1"},
        {"/shards/slot_offsets", {2}, "/shards/slot_offsets[1] is 0; it must be 4"}})
    EXPECT_NE(refusal_with(place, extents).find(text), std::string::npos) << place;
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
  std::vector<std::string> more;  // that readers add to the table
  for (const LogprobsArray& array : logprobs_arrays()) more.push_back("/reference/" + array.name);
  for (const char* name :
       {"layer_types", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
        "linear_value_head_dim", "linear_conv_kernel_dim"})
    more.push_back(fmt::format("/model@{}", name));
  for (const char* folder : {"", "golden"})
    for (const auto& entry : std::filesystem::directory_iterator(test::input(folder)))
      if (entry.path().extension() == ".h5") {
        EXPECT_EQ(said_of(entry.path(), more), std::vector<std::string>{}) << entry.path();
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
