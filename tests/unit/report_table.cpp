#include <limits>

#include "core/error.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "report/table.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Row {
  int64_t tokens;
  std::string schedule;
  double t_med;
  double rate;
};

Table<Row> make_table() {
  return Table<Row>({{"tokens", "", 8, 0, [](const Row& r) { return r.tokens; }},
                     {"schedule", "", 10, 0, [](const Row& r) { return r.schedule; }, Align::left},
                     {"t_med", "ms", 8, 3, [](const Row& r) { return r.t_med; }},
                     {"rate", "tok/s", 9, 0, [](const Row& r) { return r.rate; }}});
}

TEST(Table, HeaderAndRowsLineUp) {
  const Table<Row> table = make_table();
  EXPECT_EQ(table.header() + table.row({131072, "ring", 12.345, 2654}) +
                table.row({1024, "all-gather", 0.5, 12}),
            "#   tokens  schedule       t_med       rate\n"
            "#                           (ms)    (tok/s)\n"
            "    131072  ring          12.345       2654\n"
            "      1024  all-gather     0.500         12\n");
}

TEST(Table, UnknownAndExtremeNumbersStayReadable) {
  const Table<Row> table = make_table();
  EXPECT_EQ(table.row({1, "ring", nan, 123456789012.0}),
            "         1  ring             n/a      1e+11\n");
  EXPECT_EQ(table.row({1, "ring", 0.0001, 0}), "         1  ring        1.000e-04         0\n");
}

TEST(Table, TooLongCellsPushTheNextOnesButNeverTouchThem) {
  const Table<Row> table = make_table();
  EXPECT_EQ(table.row({123456789012, "ring", 1, 2}),
            "  123456789012 ring        1.000          2\n");
  EXPECT_EQ(table.row({1, "hierarchical-ring-of-rings", 1, 2}),
            "         1  hierarchical-ring-of-rings 1.000 2\n");
}

TEST(Table, LongNamesAndUnitsWidenTheirColumn) {
  const std::vector<ColumnFormat> formats = {
      {"a", "", 1}, {"bandwidth", "", 2}, {"c", "GB/s/rank", 1}};
  EXPECT_EQ(header_text(formats) + row_text(formats, {"1", "2", "3"}),
            "# a  bandwidth            c\n"
            "#               (GB/s/rank)\n"
            "  1          2            3\n");
}

TEST(Table, RowsMustHaveOneValuePerColumn) {
  EXPECT_THROW(row_text({{"a", "", 1}}, {}), Error);
}

TEST(Table, CsvQuotesAndHasAllDigits) {
  EXPECT_EQ(csv_row({int64_t{2048}, "a,\"b\"", 1.0 / 3.0, nan, 1e21}),
            "2048,\"a,\"\"b\"\"\",0.3333333333333333,,1e+21\n");
}

TEST(Table, ColumnsAreChosen) {
  const Table<Row> table(
      {{"tokens", "", 8, 0, [](const Row& r) { return r.tokens; }},
       Column<Row>{"t_med", "ms", 8, 3, [](const Row& r) { return r.t_med; }}.extra(),
       Column<Row>{"rate", "Gtok/s", 9, 0, [](const Row& r) { return r.rate; }}.with_prefix()});
  const Row row{1024, "ring", 0.5, 0.0123};
  EXPECT_EQ(table.chosen("default").header() + table.chosen("default").row(row),
            "#   tokens       rate\n"
            "#             (tok/s)\n"
            "      1024     12.3 M\n");
  EXPECT_EQ(table.chosen("t_med,tokens").row(row), "     0.500      1024\n");
  EXPECT_EQ(table.chosen("all").fields(row).size(), 3U);
  EXPECT_EQ(to_text(table.units()), "t_med=ms rate=Gtok/s");
  test::expect_usage(
      "--columns: there is no column 'tmed'; there are tokens, t_med, rate; nearest: t_med",
      [&] { table.chosen("tokens,tmed"); });
  test::expect_usage("--columns: there is no column ''; there are tokens, t_med, rate",
                     [&] { table.chosen(","); });
}

TEST(Table, DoubtIsMarkedAndExplained) {
  const Table<Row> table(
      {Column<Row>{"t_med", "ms", 8, 3, [](const Row& r) { return r.t_med; }}.doubted(
          [](const Row& r) { return r.t_med > 1; })});
  EXPECT_EQ(table.text({{1, "ring", 0.5, 1}}), "#    t_med\n#     (ms)\n     0.500\n");
  EXPECT_EQ(table.text({{1, "ring", 2, 1}}),
            std::string("#    t_med\n#     (ms)\n    2.000~\n") + doubt_legend);
}

TEST(Table, RowsAreFieldsToo) {
  EXPECT_EQ(to_text(make_table().fields({1024, "ring", 0.5, 10})),
            "tokens=1024 schedule=ring t_med=0.5 rate=10");
}

TEST(Fields, TextIsUnambiguous) {
  EXPECT_EQ(to_text(Fields{
                {"a", true}, {"b", int64_t{-1}}, {"c", 0.1}, {"d", nan}, {"e", "x y"}, {"f", ""}}),
            "a=true b=-1 c=0.1 d=n/a e=\"x y\" f=\"\"");
}

}  // namespace GYRE_FILE
}  // namespace gyre
