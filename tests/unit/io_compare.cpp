// Comparing two files, tensor by tensor.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "io/compare.hpp"
#include "io/h5.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::SharedFolder;

template <class T>
void write(const std::string& path, const std::string& dataset, const std::vector<T>& values,
           h5::Shape shape = {}) {
  h5::File file = h5::File::create(path);
  if (shape.empty()) shape = {std::ssize(values)};
  file.create_dataset(dataset, dtype_of<T>, shape, h5::Checksum::none);
  const h5::Slab all{h5::Shape(shape.size(), 0), shape};
  file.dataset(dataset).write<T>(std::span(&all, 1), std::span<const T>(values));
  file.close();
}

/// Compares one tensor of each file.
template <class A, class B>
TensorComparison compare(const std::vector<A>& a, const std::vector<B>& b,
                         const CompareOptions& options = {}, const h5::Shape& shape = {}) {
  const SharedFolder folder;
  write(folder.file("a.h5"), "/x/t", a, shape);
  write(folder.file("b.h5"), "/x/t", b, shape);
  const auto results = compare_files(folder.file("a.h5"), folder.file("b.h5"), options);
  EXPECT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].path, "x/t");
  return results[0];
}

TEST(Compare, EqualTensors) {
  const TensorComparison result = compare<float>({1, 2, 3}, std::vector<float>{1, 2, 3});
  EXPECT_EQ(result.match, Match::same);
  EXPECT_EQ(result.elements, 3);
  EXPECT_EQ(result.max_error, 0);
  EXPECT_EQ(result.worst_index, "");
}

TEST(Compare, RealsWithinAndBeyondTheTolerance) {
  const CompareOptions options{.rtol = 0, .atol = 0.5};
  const TensorComparison within =
      compare<float>({1, 2, 3, 4}, std::vector<double>{1, 2.25, 3, 4}, options, {2, 2});
  EXPECT_EQ(within.match, Match::same);
  EXPECT_EQ(within.max_error, 0.25);
  EXPECT_EQ(within.err_over_tol, 0.5);
  EXPECT_EQ(within.worst_index, "[0, 1]");
  const TensorComparison beyond =
      compare<float>({1, 2, 4, 4}, std::vector<double>{1, 2.25, 3, 4}, options, {2, 2});
  EXPECT_EQ(beyond.match, Match::differs);
  EXPECT_EQ(beyond.err_over_tol, 2);
  EXPECT_EQ(beyond.outside, 1);
  EXPECT_EQ(beyond.worst_index, "[1, 0]");
  EXPECT_EQ(beyond.worst_a, "4");
  EXPECT_EQ(beyond.worst_b, "3");
}

TEST(Compare, RelativeToTheSecond) {
  const CompareOptions options{.rtol = 0.1, .atol = 0};
  EXPECT_EQ(compare<double>({109}, std::vector<double>{100}, options).match, Match::same);
  EXPECT_EQ(compare<double>({111}, std::vector<double>{100}, options).match, Match::differs);
  EXPECT_EQ(compare<double>({1e-30}, std::vector<double>{0}, options).match, Match::differs);
}

TEST(Compare, AToleranceAboveTheValuesFails) {
  const std::vector<double> values{1, 2}, zeros{0, 0};
  EXPECT_EQ(compare(values, values, {.rtol = 1}).match, Match::wide);
  EXPECT_EQ(compare(values, values, {.atol = 1.51}).match, Match::wide);
  EXPECT_EQ(compare(values, values, {.rtol = 0.5, .atol = 0.76}).match, Match::wide);
  EXPECT_EQ(compare(values, values, {.rtol = 0.5, .atol = 0.74}).match, Match::same);
  EXPECT_EQ(compare(zeros, zeros, {.atol = 1}).match, Match::same);
  EXPECT_EQ(compare(zeros, zeros, {.atol = 1.01}).match, Match::wide);
  EXPECT_EQ(compare<int64_t>({1, 2}, std::vector<int64_t>{1, 2}, {.rtol = 9}).match, Match::same);
}

TEST(Compare, ValuesBeyondTheRangeOfATypeAreInfinite) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto least = static_cast<float>(-inf);
  EXPECT_EQ(compare<float>({least}, std::vector<double>{-4.86e38}).match, Match::same);
  EXPECT_EQ(compare<float>({least}, std::vector<double>{4.86e38}).match, Match::differs);
  EXPECT_EQ(compare<float>({least}, std::vector<double>{-3.4e38}).match, Match::differs);
  EXPECT_EQ(compare<double>({-inf}, std::vector<double>{-4.86e38}).match, Match::differs);
}

TEST(Compare, ACommonFactorIsNamed) {
  const std::vector<double> right{1, -2.5, 0, 7};
  EXPECT_EQ(describe(compare<float>({2, -5, 0, 14}, right)),
            "differs by a factor 2: gather convention?");
  EXPECT_EQ(describe(compare<double>({2, -5, 0, 14.1}, right)), "differs");
}

TEST(Compare, NanAgreesWithNanOnlyOnRequest) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const CompareOptions nan_agrees{.equal_nan = true};
  EXPECT_EQ(compare<double>({nan, inf}, std::vector<double>{nan, inf}, nan_agrees).match,
            Match::same);
  const TensorComparison result = compare<double>({1, nan}, std::vector<double>{1, nan});
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_index, "[1]");
  EXPECT_EQ(result.worst_a, "nan");
  for (auto [a, b] :
       std::vector<std::pair<double, double>>{{nan, 1}, {1, nan}, {inf, -inf}, {1, inf}}) {
    const TensorComparison mixed = compare<double>({a}, std::vector<double>{b}, nan_agrees);
    EXPECT_EQ(mixed.match, Match::differs) << a << " " << b;
    EXPECT_EQ(mixed.max_error, inf);
  }
}

TEST(Compare, IntegersMustBeEqual) {
  const int64_t big = (int64_t{1} << 53) + 1;
  EXPECT_EQ(compare<int32_t>({1, -2}, std::vector<int64_t>{1, -2}).match, Match::same);
  const TensorComparison result = compare<int64_t>({5, big}, std::vector<int64_t>{5, big - 1});
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_index, "[1]");
  EXPECT_EQ(result.worst_a, std::to_string(big));
}

/// Writes one dataset /x of any type of HDF5.
template <class T>
void write_as(const std::string& path, hid_t type, const std::vector<T>& values) {
  const h5::Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
  test::make_dataset(file.get(), "/x", type, {values.size()}, values.data());
}

TensorComparison compare_written(const SharedFolder& folder, const CompareOptions& options = {}) {
  return compare_files(folder.file("a.h5"), folder.file("b.h5"), options).at(0);
}

TEST(Compare, NothingIsRoundedBefore) {
  const SharedFolder folder;
  const std::string a = folder.file("a.h5"), b = folder.file("b.h5");
  constexpr uint64_t top = uint64_t{1} << 63;
  write_as<uint64_t>(a, H5T_NATIVE_UINT64, {top + 5});
  write_as<uint64_t>(b, H5T_NATIVE_UINT64, {top + 6});
  TensorComparison result = compare_written(folder);
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_a, "9223372036854775813");
  EXPECT_EQ(result.max_error, 1);
  write_as<uint64_t>(b, H5T_NATIVE_UINT64, {top + 5});
  EXPECT_EQ(compare_written(folder).match, Match::same);
  write_as<int64_t>(b, H5T_NATIVE_INT64, {std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(compare_written(folder).match, Match::differs) << "where HDF5 would clip";

  const CompareOptions exact{.rtol = 0, .atol = 0};
  constexpr int64_t odd = (int64_t{1} << 53) + 1;
  write_as<int64_t>(a, H5T_NATIVE_INT64, {odd});
  write_as<double>(b, H5T_NATIVE_DOUBLE, {static_cast<double>(odd)});
  EXPECT_EQ(compare_written(folder, exact).match, Match::differs);
  EXPECT_EQ(compare_written(folder, exact).max_error, 1);
  write_as<double>(b, H5T_NATIVE_DOUBLE, {static_cast<double>(odd - 1)});
  write_as<int64_t>(a, H5T_NATIVE_INT64, {odd - 1});
  EXPECT_EQ(compare_written(folder, exact).match, Match::same);

  const long double third = 1.0L / 3;
  write_as<long double>(a, H5T_NATIVE_LDOUBLE, {third});
  write_as<double>(b, H5T_NATIVE_DOUBLE, {static_cast<double>(third)});
  EXPECT_EQ(compare_written(folder, exact).match, Match::differs);
  EXPECT_EQ(compare_written(folder).match, Match::same);
}

TEST(Compare, BooleansAreIntegers) {
  const SharedFolder folder;
  const h5::Handle boolean = test::make_enumeration({"FALSE", "TRUE"});
  const int8_t no = 0, yes = 1;
  write_as<int8_t>(folder.file("a.h5"), boolean.get(), {yes, no});
  write_as<int8_t>(folder.file("b.h5"), boolean.get(), {yes, no});
  EXPECT_EQ(compare_written(folder).match, Match::same);
  write_as<int8_t>(folder.file("b.h5"), boolean.get(), {yes, yes});
  const TensorComparison result = compare_written(folder, {.rtol = 10, .atol = 10});
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_index, "[1]");
  write_as<int32_t>(folder.file("b.h5"), H5T_NATIVE_INT32, {1, 0});
  EXPECT_EQ(compare_written(folder).match, Match::same);
}

TEST(Compare, LinksAreFollowed) {
  const SharedFolder folder;
  write<float>(folder.file("a.h5"), "/data/x", {1});
  write<float>(folder.file("b.h5"), "/data/x", {1});
  const auto add_link = [&](const char* name, const char* target) {
    const h5::Handle file(H5Fopen(folder.file(name).c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
    H5Lcreate_soft(target, file.get(), "/y", H5P_DEFAULT, H5P_DEFAULT);
  };
  add_link("a.h5", "/data/x");
  EXPECT_EQ(compare_files(folder.file("a.h5"), folder.file("b.h5"), {})[1].match, Match::only_in_a);
  add_link("b.h5", "/data/z");
  expect_error(ExitCode::usage, "the link 'y' -> '/data/z', which leads to nothing",
               [&] { compare_files(folder.file("a.h5"), folder.file("b.h5"), {}); });
}

TEST(Compare, BlocksOfLargeTensors) {
  std::vector<float> a(3'000'000), b;
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 1000);
  b = a;
  b[2'900'001] += 3;
  const TensorComparison result = compare(a, b, {}, {3000, 1000});
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_index, "[2900, 1]");
}

TEST(Compare, TextsShapesKindsAndAbsence) {
  const SharedFolder folder;
  const std::vector<std::string> ab{"a", "b"}, ac{"a", "c"};
  const std::vector<double> three{1, 2, 3}, two{1, 2};
  {
    h5::File a = h5::File::create(folder.file("a.h5")), b = h5::File::create(folder.file("b.h5"));
    a.write_dataset("/kind", std::span(ab));
    b.write_dataset("/kind", std::span<const double>(two));
    a.write_dataset("/mine", std::span(ab));
    b.write_dataset("/theirs", std::span(ab));
    a.write_dataset("/shape", std::span<const double>(three));
    b.write_dataset("/shape", std::span<const double>(two));
    a.write_dataset("/text", std::span(ab));
    b.write_dataset("/text", std::span(ac));
  }
  const auto all = compare_files(folder.file("a.h5"), folder.file("b.h5"), {});
  ASSERT_EQ(all.size(), 5U);
  EXPECT_EQ(describe(all[0]), "types that cannot be compared");
  EXPECT_EQ(describe(all[1]), "only in A");
  EXPECT_EQ(describe(all[2]), "shapes [3] and [2]");
  EXPECT_EQ(describe(all[3]), "differs");
  EXPECT_EQ(all[3].worst_index, "[1]");
  EXPECT_EQ(all[3].worst_b, "c");
  EXPECT_EQ(describe(all[4]), "only in B");
  EXPECT_EQ(compare_files(folder.file("a.h5"), folder.file("b.h5"), {.common_only = true}).size(),
            3U);
}

TEST(Compare, GroupsOfDifferentNames) {
  const SharedFolder folder;
  write<float>(folder.file("a.h5"), "/results/logprob", {-1, -2});
  write<double>(folder.file("b.h5"), "/reference/logprob", {-1, -2.000001});
  const auto results =
      compare_files(folder.file("a.h5") + ":/results", folder.file("b.h5") + ":/reference", {});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].path, "logprob");
  EXPECT_EQ(results[0].match, Match::same);
}

TEST(CompareRejected, FilesAndGroups) {
  const SharedFolder folder;
  write<float>(folder.file("a.h5"), "/a/x", {1});
  write<float>(folder.file("b.h5"), "/b/y", {1});
  const std::string a = folder.file("a.h5"), b = folder.file("b.h5");
  expect_error(ExitCode::usage, "cannot read 'none.h5': No such file or directory",
               [&] { compare_files(a, "none.h5", {}); });
  expect_error(ExitCode::usage, "a.h5' has no group '/q'",
               [&] { compare_files(a + ":/q", b, {}); });
  expect_error(ExitCode::usage, "have no tensor in common",
               [&] { compare_files(a, b, {.common_only = true}); });
}

/// Compares ids [2, 4] that stand beside values, of which both files have the same.
TensorComparison compare_ids(const std::vector<int32_t>& a, const std::vector<int32_t>& b,
                             bool any_of_ties) {
  const SharedFolder folder;
  const std::vector<float> values{5, 5, 4, 4, 9, 8, 8, 7};
  const auto save = [&](const std::string& name, const std::vector<int32_t>& ids) {
    h5::File file = h5::File::create(folder.file(name));
    file.write_dataset("/x/top_values", std::span<const float>(values), {2, 4});
    file.write_dataset("/x/top_ids", std::span<const int32_t>(ids), {2, 4});
    file.close();
  };
  save("a.h5", a);
  save("b.h5", b);
  const auto results =
      compare_files(folder.file("a.h5"), folder.file("b.h5"), {.any_of_ties = any_of_ties});
  EXPECT_EQ(results.at(0).path, "x/top_ids");
  EXPECT_EQ(results.at(1).match, Match::same);
  return results.at(0);
}

TEST(Compare, IdsOfEqualValuesHaveAnOrderUnlessAnyWillDo) {
  const std::vector<int32_t> ids{1, 2, 3, 4, 5, 6, 7, 8}, swapped{2, 1, 3, 4, 5, 7, 6, 8},
      other_last{1, 2, 9, 3, 5, 6, 7, 8}, wrong{1, 2, 3, 4, 6, 5, 7, 8};
  EXPECT_EQ(compare_ids(ids, swapped, false).outside, 4);
  EXPECT_EQ(compare_ids(ids, swapped, true).match, Match::same);
  EXPECT_EQ(compare_ids(ids, other_last, true).match, Match::same);
  const TensorComparison result = compare_ids(ids, wrong, true);
  EXPECT_EQ(result.match, Match::differs);
  EXPECT_EQ(result.worst_index, "[1, 0]");
  EXPECT_EQ(result.outside, 2);
}

}  // namespace GYRE_FILE
}  // namespace gyre
