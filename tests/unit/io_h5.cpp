// The HDF5 layer: attributes, listings, slabs, types, errors.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "io/h5.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre::h5 {
namespace GYRE_FILE {

using test::expect_error;
using test::SharedFolder;

/// 0, 1, 2, ... in the given shape.
void write_count(File& file, const std::string& path, const Shape& shape, Checksum checksum) {
  file.create_dataset(path, DType::i32, shape, checksum);
  std::vector<int32_t> values(elements_of(shape));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i);
  const Slab all{Shape(shape.size(), 0), shape};
  file.dataset(path).write<int32_t>(std::span(&all, 1), std::span<const int32_t>(values));
}

TEST(H5, AttributesOfAllTypes) {
  const SharedFolder folder;
  File file = File::create(folder.file("a.h5"));
  file.create_group("/x/y");
  file.write_attribute("/x/y", "integer", int64_t{-7});
  file.write_attribute("/x/y", "real", 0.1);
  file.write_attribute("/x/y", "text", std::string("zwölf"));
  file.write_attribute("/", "empty", std::string());
  file.write_attribute("/", "long", std::string(200'000, 'l'));
  file.close();
  const File read = File::open(folder.file("a.h5"));
  EXPECT_EQ(std::get<int64_t>(read.attribute("/x/y", "integer")), -7);
  EXPECT_EQ(std::get<double>(read.attribute("/x/y", "real")), 0.1);
  EXPECT_EQ(std::get<std::string>(read.attribute("/x/y", "text")), "zwölf");
  EXPECT_EQ(std::get<std::string>(read.attribute("/", "empty")), "");
  EXPECT_EQ(std::get<std::string>(read.attribute("/", "long")).size(), 200'000U);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(read.attribute("/x/y", "none")));
  EXPECT_TRUE(std::holds_alternative<std::monostate>(read.attribute("/none", "real")));
  EXPECT_EQ(to_string(read.attribute("/x/y", "text")), "'zwölf'");
}

TEST(H5, AttributesThatAreNotOneValueAreNotAbsent) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  {
    const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
    const auto write = [&](const char* name, hid_t type, const void* value,
                           const std::vector<hsize_t>& shape = {}) {
      test::make_attribute(file.get(), "/", name, type, value, shape);
    };
    const std::array<double, 3> reals{1, 2, 3};
    write("row", H5T_NATIVE_DOUBLE, reals.data(), {3});
    write("single", H5T_NATIVE_DOUBLE, reals.data(), {1});
    const Handle null(H5Screate(H5S_NULL), H5Sclose);
    const Handle none(
        H5Acreate2(file.get(), "null", H5T_NATIVE_DOUBLE, null.get(), H5P_DEFAULT, H5P_DEFAULT),
        H5Aclose);
    const uint64_t large = UINT64_MAX, fits = INT64_MAX;
    write("large", H5T_NATIVE_UINT64, &large);
    write("fits", H5T_NATIVE_UINT64, &fits);
    const Handle truth = test::make_enumeration({"FALSE", "TRUE"}),
                 colours = test::make_enumeration({"RED", "BLUE"});
    const int8_t no = 0, yes = 1;
    write("false", truth.get(), &no);
    write("true", truth.get(), &yes);
    write("blue", colours.get(), &yes);
  }
  const File read = File::open(path);
  const std::map<std::string, AttributeValue> wanted{
      {"row", Unreadable{"float64 [3]"}},
      {"single", 1.0},
      {"null", Unreadable{"empty"}},
      {"large", Unreadable{"18446744073709551615, above 2^63 - 1"}},
      {"fits", INT64_MAX},
      {"false", false},
      {"true", true},
      {"blue", Unreadable{"an enumeration other than of FALSE and TRUE"}},
  };
  for (const auto& [name, value] : wanted)
    EXPECT_EQ(to_string(read.attribute("/", name)), to_string(value)) << name;
  EXPECT_EQ(read.attributes_of("/").size(), wanted.size());
}

// Filter 32000 is LZF, which h5py brings along: the name that it gave stays in the file.
TEST(H5, AFilterThatIsMissingIsNamed) {
  const auto unchanged = [](unsigned, size_t, const unsigned*, size_t bytes, size_t*, void**) {
    return bytes;
  };
  const H5Z_class2_t lzf{H5Z_CLASS_T_VERS, 32000, 1, 1, "lzf", nullptr, nullptr, unchanged};
  ASSERT_GE(H5Zregister(&lzf), 0);
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  {
    const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
    const hsize_t length = 4;
    const Handle list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_chunk(list.get(), 1, &length);
    H5Pset_shuffle(list.get());  // is there
    H5Pset_filter(list.get(), 32000, H5Z_FLAG_MANDATORY, 0, nullptr);
    test::make_dataset(file.get(), "x", H5T_STD_I32LE, {length}, nullptr, list.get());
  }
  ASSERT_GE(H5Zunregister(32000), 0);
  expect_error(ExitCode::usage, "dataset '/x' of '" + path + "' needs HDF5 filter 32000 (lzf);",
               [&] { (void)File::open(path).dataset("/x"); });
}

TEST(H5, WhatThereIs) {
  const SharedFolder folder;
  File file = File::create(folder.file("a.h5"));
  write_count(file, "/g/h/two", {2, 2}, Checksum::none);
  write_count(file, "/g/one", {3}, Checksum::fletcher32);
  file.create_group("/g/nothing");
  EXPECT_TRUE(file.has_group("/"));
  EXPECT_TRUE(file.has_group("/g/h"));
  EXPECT_FALSE(file.has_group("/g/one"));
  EXPECT_TRUE(file.has_dataset("/g/one"));
  EXPECT_FALSE(file.has_dataset("/g/one/two/three"));
  EXPECT_FALSE(file.has_dataset("/q/r"));
  EXPECT_EQ(file.datasets_below("/"), (std::vector<std::string>{"g/h/two", "g/one"}));
  EXPECT_EQ(file.datasets_below("/g/"), (std::vector<std::string>{"h/two", "one"}));
  EXPECT_TRUE(file.datasets_below("/g/nothing").empty());
}

TEST(H5, SlabsInFileOrder) {
  const SharedFolder folder;
  File file = File::create(folder.file("a.h5"));
  for (Checksum checksum : {Checksum::none, Checksum::fletcher32}) {
    const std::string path = checksum == Checksum::none ? "/plain" : "/checked";
    write_count(file, path, {5, 4}, checksum);
    const std::vector<Slab> slabs{{{0, 1}, {1, 2}}, {{2, 1}, {0, 2}}, {{3, 1}, {2, 2}}};
    std::vector<double> values(6);
    file.dataset(path).read<double>(slabs, values);
    EXPECT_EQ(values, (std::vector<double>{1, 2, 13, 14, 17, 18}));
  }
}

TEST(H5, ScalarsAndEmptyDatasets) {
  const SharedFolder folder;
  File file = File::create(folder.file("a.h5"));
  write_count(file, "/scalar", {}, Checksum::fletcher32);
  write_count(file, "/empty", {0, 3}, Checksum::fletcher32);
  EXPECT_TRUE(file.dataset("/scalar").shape().empty());
  EXPECT_EQ(file.dataset("/scalar").read_all<int32_t>(), std::vector<int32_t>{0});
  EXPECT_EQ(file.dataset("/empty").shape(), (Shape{0, 3}));
  EXPECT_TRUE(file.dataset("/empty").read_all<int32_t>().empty());
}

TEST(H5, Types) {
  const SharedFolder folder;
  File file = File::create(folder.file("a.h5"));
  const std::vector<std::pair<DType, Type>> types{{DType::f32, Type::f32},
                                                  {DType::f64, Type::f64},
                                                  {DType::i32, Type::i32},
                                                  {DType::i64, Type::i64}};
  for (auto [written, read] : types) {
    const std::string path = "/" + std::string(name_of(written));
    file.create_dataset(path, written, {1}, Checksum::none);
    EXPECT_EQ(file.dataset(path).type(), read);
  }
  const std::vector<std::string> texts{"", "ein", "zwei"};
  file.write_dataset("/texts", std::span(texts));
  EXPECT_EQ(file.dataset("/texts").type(), Type::text);
  EXPECT_EQ(file.dataset("/texts").read_texts(), texts);
  EXPECT_TRUE(is_integer(Type::i32) && is_integer(Type::integer) && !is_integer(Type::f32));
  EXPECT_TRUE(is_real(Type::f32) && !is_real(Type::text));
}

TEST(H5, ErrorsNameFileAndDataset) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  File file = File::create(path);
  write_count(file, "/v", {3}, Checksum::none);
  expect_error(ExitCode::runtime,
               "cannot open dataset '/w' of '" + path + "': ", [&] { (void)file.dataset("/w"); });
  const Slab outside{{2}, {2}};
  std::vector<int32_t> two(2);
  expect_error(ExitCode::runtime, "cannot read dataset '/v' of '" + path + "': ", [&] {
    file.dataset("/v").read<int32_t>(std::span(&outside, 1), std::span(two));
  });
  expect_error(ExitCode::runtime, "cannot create dataset '/v' of '" + path + "': ", [&] {
    file.create_dataset("/v", DType::i32, {1}, Checksum::none);
  });
  expect_error(ExitCode::runtime, "cannot create '/no/such/folder/x.h5': ", [] {
    File::create("/no/such/folder/x.h5");
  });
  expect_error(ExitCode::runtime, "3 elements selected for a buffer of 2", [&] {
    const Slab all{{0}, {3}};
    file.dataset("/v").read<int32_t>(std::span(&all, 1), std::span(two));
  });
}

TEST(H5, Bfloat16InIntegersIsReal) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  const std::vector<uint16_t> words{0x3fc0, 0xc000, 0xff80};  // 1.5, -2, -inf
  {
    const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
    for (const char* name : {"/x", "/y"})
      test::make_dataset(file.get(), name, H5T_STD_U16LE, {words.size()}, words.data());
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(type.get(), H5T_VARIABLE);
    const char* text = "bfloat16";
    test::make_attribute(file.get(), "/x", "dtype", type.get(), &text);
  }
  const File read = File::open(path);
  EXPECT_EQ(read.dataset("/x").type(), Type::bfloat16);
  EXPECT_EQ(read.dataset("/y").type(), Type::integer);
  EXPECT_EQ(read.dataset("/x").read_all<float>(), (std::vector<float>{1.5F, -2, -INFINITY}));
  EXPECT_EQ(read.dataset("/x").read_all<double>(), (std::vector<double>{1.5, -2, -INFINITY}));
  const Slab all{{0}, {3}};
  std::vector<long double> exact(3);
  read.dataset("/x").read_exactly(std::span(&all, 1), exact);
  EXPECT_EQ(exact[1], -2.0L);
}

TEST(H5, SixteenBitsAreWidenedAsByHdf5) {
  const SharedFolder folder;
  const std::string path = folder.file("a.h5");
  std::vector<uint16_t> words(1 << 16);
  std::iota(words.begin(), words.end(), uint16_t{0});
  for (const Type type : {Type::float16, Type::bfloat16}) {
    File file = File::create(path);
    file.write_dataset("/x", stored_type_of(type), std::as_bytes(std::span(words)), {256, 256});
    file.close();
    std::vector<float> theirs(words.size());
    {
      const Handle raw(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
      const Handle x(H5Dopen2(raw.get(), "/x", H5P_DEFAULT), H5Dclose);
      H5Dread(x.get(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, theirs.data());
    }
    const File read = File::open(path);
    const Dataset dataset = read.dataset("/x");
    EXPECT_EQ(dataset.type(), type);
    const std::vector<std::byte> stored = dataset.read_all_bytes();
    EXPECT_EQ(std::memcmp(stored.data(), words.data(), stored.size()), 0);
    const std::vector<float> ours = dataset.read_all<float>();
    const std::vector<double> twice = dataset.read_all<double>();
    for (size_t i = 0; i < words.size(); ++i) {
      const bool nan = std::isnan(theirs[i]);
      EXPECT_EQ(std::isnan(ours[i]), nan) << words[i];
      if (nan) continue;
      EXPECT_EQ(std::memcmp(&ours[i], &theirs[i], sizeof(float)), 0) << words[i];
      EXPECT_EQ(twice[i], static_cast<double>(theirs[i])) << words[i];
    }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre::h5
