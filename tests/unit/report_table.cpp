#include <limits>

#include "core/error.hpp"
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
  EXPECT_EQ(header_text(formats) + row_text(formats, {int64_t{1}, int64_t{2}, int64_t{3}}),
            "# a  bandwidth            c\n"
            "#               (GB/s/rank)\n"
            "  1          2            3\n");
}

TEST(Table, RowsMustHaveOneValuePerColumn) {
  EXPECT_THROW(row_text({{"a", "", 1}}, {}), Error);
}

TEST(Table, CsvHasUnitsInNamesAndAllDigits) {
  EXPECT_EQ(make_table().csv({{1024, "ring", 0.1, nan}, {2048, "a,\"b\"", 1.0 / 3.0, 1e21}}),
            "tokens,schedule,t_med_ms,rate_tok_s\n"
            "1024,ring,0.1,\n"
            "2048,\"a,\"\"b\"\"\",0.3333333333333333,1e+21\n");
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
