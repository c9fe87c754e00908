// Made-up document lengths: their statistics, their repeatability, and the text that names them.

#include "packing/lengths.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <numeric>

#include "errors.hpp"
#include "packing/random.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Lengths = std::vector<int64_t>;

Lengths draw(const char* text) {
  return draw_lengths(parse_length_spec(text));
}

double mean_of(const Lengths& lengths) {
  return static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) /
         static_cast<double>(lengths.size());
}

/// Share of all tokens that is in documents longer than `length`.
double tokens_above(const Lengths& lengths, int64_t length) {
  int64_t above = 0, all = 0;
  for (int64_t n : lengths) {
    all += n;
    if (n > length) above += n;
  }
  return static_cast<double>(above) / static_cast<double>(all);
}

TEST(LongTailed, HasThePublishedShares) {
  const Lengths lengths = draw("dist=long-tailed,count=1M,seed=3");
  EXPECT_EQ(lengths.size(), 1048576U);
  EXPECT_NEAR(mean_of(lengths), 1811, 40);
  EXPECT_NEAR(tokens_above(lengths, 8192), 0.46, 0.01);
  EXPECT_NEAR(tokens_above(lengths, 32768), 0.25, 0.01);
  EXPECT_EQ(*std::min_element(lengths.begin(), lengths.end()), 64);
  EXPECT_GT(*std::max_element(lengths.begin(), lengths.end()), 1 << 19);
}

TEST(LongTailed, IsCutAtTheMaximum) {
  const Lengths whole = draw("dist=long-tailed,count=10000,seed=3"),
                cut = draw("dist=long-tailed,count=10000,seed=3,max=5K");
  EXPECT_GT(std::count(cut.begin(), cut.end(), 5120), 300);
  for (size_t i = 0; i < whole.size(); ++i) ASSERT_EQ(cut[i], std::min<int64_t>(whole[i], 5120));
}

TEST(LogNormal, HasItsMedianAndSpread) {
  Lengths lengths = draw("dist=log-normal,count=100K,median=1000,sigma=0.5,seed=2");
  std::sort(lengths.begin(), lengths.end());
  const auto at = [&](double share) { return static_cast<double>(lengths[share * 102400]); };
  EXPECT_NEAR(at(0.5), 1000, 10);
  EXPECT_NEAR(std::log(at(0.841345) / 1000), 0.5, 0.01);
  EXPECT_NEAR(std::log(at(0.158655) / 1000), -0.5, 0.01);
  EXPECT_NEAR(mean_of(lengths), 1000 * std::exp(0.125), 10);
}

TEST(LogNormal, IsCutOnBothSides) {
  const Lengths lengths = draw("dist=log-normal,count=1000,median=100,sigma=2,min=50,max=200");
  EXPECT_EQ(*std::min_element(lengths.begin(), lengths.end()), 50);
  EXPECT_EQ(*std::max_element(lengths.begin(), lengths.end()), 200);
}

TEST(Uniform, TakesEveryValueEvenly) {
  std::vector<int> times(5, 0);
  for (int64_t length : draw("dist=uniform,count=50000,min=10,max=14")) ++times.at(length - 10);
  for (int count : times) EXPECT_NEAR(count, 10000, 450);  // 5 standard deviations
}

TEST(Fixed, IsFixed) {
  EXPECT_EQ(draw("dist=fixed,length=512,count=3"), (Lengths{512, 512, 512}));
}

TEST(Speech, UtterancesLastBetweenOneAndFortySeconds) {
  const Lengths lengths = draw("dist=speech,count=100K");
  Lengths sorted = lengths;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_GE(sorted.front(), 13 + 3);       // 1 s: 12.5 frames and 2.45 tokens, rounded up
  EXPECT_LE(sorted.back(), 500 + 182);     // 40 s at 12.5 frames and 4.55 tokens
  EXPECT_GT(sorted.back(), 500 + 40 * 3);  // some utterance is that long
  EXPECT_NEAR(static_cast<double>(sorted[sorted.size() / 2]), 8 * (12.5 + 3.5) + 1, 2);
  EXPECT_EQ(draw("dist=speech,count=1,sigma=0,seconds=10,text-rate=0"), (Lengths{125}));
}

/// A file in the folder of temporary files.
std::string file_of(const char* name, const std::string& text) {
  const std::string path = testing::TempDir() + "gyre_" + name;
  std::ofstream(path) << text;
  return path;
}

TEST(Histogram, HasTheSharesOfItsFile) {
  const std::string file = file_of("a.csv", "# source\nbelow,share\n3,1\n10,0\n12,2\r\n\n13,1\n");
  std::vector<int> times(13, 0);
  for (const int64_t n : draw(("dist=histogram,count=40000,file=" + file).c_str())) ++times.at(n);
  EXPECT_NEAR(times[1], 5000, 330);  // 5 standard deviations
  EXPECT_NEAR(times[2], 5000, 330);
  EXPECT_EQ(std::accumulate(times.begin() + 3, times.begin() + 10, times[0]), 0);
  EXPECT_NEAR(times[10], 10000, 450);
  EXPECT_NEAR(times[11], 10000, 450);
  EXPECT_NEAR(times[12], 10000, 450);
  const Lengths cut = draw(("dist=histogram,count=1000,max=2,file=" + file).c_str());
  EXPECT_EQ(*std::max_element(cut.begin(), cut.end()), 2);
}

TEST(Histogram, FilesInTheFolderOfInputs) {
  const std::string folder = GYRE_SOURCE_DIR "/inputs/lengths/";
  const auto of = [&](const std::string& name) {
    return draw(("dist=histogram,count=200K,seed=5,file=" + folder + name).c_str());
  };
  const Lengths short_ones = of("prolong64k.csv"), all = of("prolong512k.csv"),
                mixed = of("prolong512k-long.csv");
  EXPECT_NEAR(mean_of(short_ones), 1017, 25);
  EXPECT_LT(*std::max_element(short_ones.begin(), short_ones.end()), 61920);
  EXPECT_NEAR(tokens_above(mixed, 8191) - 0.4 * tokens_above(all, 8191), 0.6, 0.02);
  for (const int64_t n : of("blocks-1k.csv")) ASSERT_EQ(n % 1024, 0);
}

TEST(List, IsReadAsItIs) {
  EXPECT_EQ(draw(("dist=list,file=" + file_of("a.txt", "5\n# x\n0\n7\n")).c_str()),
            (Lengths{5, 0, 7}));
}

TEST(LengthFiles, RefuseWhatTheyAreNot) {
  const auto refuses = [](const char* dist, const std::string& text, const std::string& message) {
    const std::string file = file_of("wrong", text);
    expect_usage(file + ": " + message,
                 [&] { draw((std::string("dist=") + dist + ",file=" + file).c_str()); });
  };
  refuses("histogram", "", "it cannot be read, or is empty");
  refuses("histogram", "9,1\n", "line 1: '9,1': a histogram begins with the line below,share");
  refuses("histogram", "below,share\n9\n",
          "line 2: '9' is no length and share, such as 96,0.05438");
  refuses("histogram", "below,share\n9,1\n9,1\n", "line 3: below=9: must be from 10 to 1073741825");
  refuses("histogram", "below,share\n9,-1\n", "line 2: share=-1: must be at least 0");
  refuses("histogram", "below,share\n9,0\n", "no interval has a share above 0");
  refuses("list", "1K\n", "line 1: '1K' is no length, such as 4096");
  refuses("list", "3\n-1\n", "line 2: -1: must be from 0 to 1073741824");
  expect_usage("/no/such: No such file or directory", [] { draw("dist=list,file=/no/such"); });
}

TEST(DrawLengths, TokensCutTheLastDocument) {
  const Lengths all = draw("dist=uniform,count=9,min=5,max=9,seed=3"),
                cut = draw("dist=uniform,tokens=33,min=5,max=9,seed=3");
  EXPECT_EQ(std::accumulate(cut.begin(), cut.end(), int64_t{0}), 33);
  for (size_t i = 0; i + 1 < cut.size(); ++i) EXPECT_EQ(cut[i], all[i]);
  EXPECT_LE(cut.back(), all[cut.size() - 1]);
  expect_usage("tokens=5: these are more than 16777216 documents",
               [] { draw("dist=fixed,length=0,tokens=5"); });
}

TEST(DrawLengths, PinnedValues) {
  // The integers were confirmed by a Mersenne Twister written apart from any C++ library.
  EXPECT_EQ(draw("dist=uniform,count=6,min=1,max=1000,seed=7"),
            (Lengths{16, 251, 879, 47, 422, 429}));
  EXPECT_EQ(draw("dist=log-normal,count=6,seed=7"), (Lengths{2089, 5126, 6585, 1674, 736, 553}));
  EXPECT_EQ(draw("dist=long-tailed,count=6,seed=7"), (Lengths{354, 502, 236, 582, 1764, 497}));
  EXPECT_EQ(draw("dist=speech,count=6,seed=7"), (Lengths{188, 145, 168, 133, 101, 345}));
}

TEST(DrawLengths, SeedsDiffer) {
  for (const char* name : {"uniform", "log-normal", "long-tailed", "speech"}) {
    LengthSpec spec = parse_length_spec("dist=" + std::string(name));
    const Lengths first = draw_lengths(spec);
    EXPECT_EQ(draw_lengths(spec), first) << name;
    spec.seed = 2;
    EXPECT_NE(draw_lengths(spec), first) << name;
  }
}

TEST(DrawLengths, ChecksSpecificationsThatWereNotParsed) {
  LengthSpec spec;
  spec.count = -1;
  expect_usage("count=-1: must be from 1 to 16777216; the nearest is 1",
               [&] { draw_lengths(spec); });
  spec = {};
  spec.distribution = "bimodal";
  expect_usage(
      "there is no length distribution 'bimodal'; there are fixed, uniform, "
      "log-normal, long-tailed, speech, histogram, list",
      [&] { draw_lengths(spec); });
}

TEST(ParseLengthSpec, ReadsKeysInAnyOrder) {
  const LengthSpec spec = parse_length_spec("max=64K,count=4096,seed=7,dist=long-tailed");
  EXPECT_EQ(spec.distribution, "long-tailed");
  EXPECT_EQ(spec.count, 4096);
  EXPECT_EQ(spec.max, 65536);
  EXPECT_EQ(spec.seed, 7U);
  EXPECT_EQ(parse_length_spec("dist=fixed,length=2m,count=16m").length, 2 << 20);
  EXPECT_EQ(parse_length_spec(""), LengthSpec{});
  EXPECT_EQ(parse_length_spec("seed=18446744073709551615").seed, UINT64_MAX);
  EXPECT_EQ(parse_length_spec("dist=speech").sigma, 0.6);
}

TEST(ParseLengthSpec, TextAndBack) {
  EXPECT_EQ(to_string(parse_length_spec("count=4096,max=64K,seed=7")),
            "dist=long-tailed,count=4096,max=65536,seed=7");
  EXPECT_EQ(to_string(parse_length_spec("dist=log-normal,sigma=0.1")),
            "dist=log-normal,count=1024,min=1,max=1048576,median=1024,sigma=0.1,seed=1");
  for (const LengthDistribution& distribution : length_distributions()) {
    LengthSpec other = distribution.defaults;
    if (std::ranges::count(distribution.keys, "file") > 0) other.file = "lengths.csv";
    EXPECT_EQ(parse_length_spec(to_string(other)), other);
    if (distribution.draws) other.tokens = 7777;
    EXPECT_EQ(parse_length_spec(to_string(other)), other);
    other.tokens = 0;
    if (distribution.draws) other.count = 77;
    other.seed = 123456789012345678U;
    EXPECT_EQ(parse_length_spec(to_string(other)), other);
  }
}

TEST(ParseLengthSpec, TextAndBackForAnyNumbers) {
  EXPECT_TRUE(rc::check("the text says it all", [] {
    LengthSpec spec = parse_length_spec("dist=log-normal");
    spec.seed = *rc::gen::arbitrary<uint64_t>();
    spec.sigma = *rc::gen::inRange(0, 1000000000) / 1e9;
    spec.min = *rc::gen::inRange<int64_t>(0, 1 << 20);
    RC_ASSERT(parse_length_spec(to_string(spec)) == spec);
  }));
}

TEST(ParseLengthSpec, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](const char* text, const char* message) {
    expect_usage(message, [&] { parse_length_spec(text); });
  };
  refuses("dist=zipf",
          "there is no length distribution 'zipf'; there are fixed, uniform, log-normal, "
          "long-tailed, speech, histogram, list");
  refuses("dist=fixed,max=3",
          "dist=fixed has no key 'max'; it has dist, count, tokens, length, seed");
  refuses("dist=list,file=f,count=3", "dist=list has no key 'count'; it has dist, file, seed");
  refuses("dist=histogram", "dist=histogram needs file=FILE");
  refuses("count=3,tokens=4", "count=3 and tokens=4: one of them");
  refuses("count", "'count' is not of the form key=value");
  refuses("count=3,,seed=1", "'' is not of the form key=value");
  refuses("=3", "'=3' is not of the form key=value");
  refuses("count=3,count=4", "key 'count' is given twice");
  for (const char* value : {"", "x", "-3", "1.5", "3KB", "99999999999999999999", "99999999999G"})
    refuses(("count=" + std::string(value)).c_str(),
            ("count: '" + std::string(value) +
             "' is not a size (digits, then K, M or G for 2^10, 2^20, 2^30)")
                .c_str());
  refuses("seed=1K", "seed: '1K' is not an integer from 0 to 2^64 - 1");
  refuses("dist=log-normal,sigma=1x", "sigma: '1x' is not a number");
  refuses("dist=log-normal,sigma=nan", "sigma: 'nan' is not a number");
}

TEST(ParseLengthSpec, RefusesValuesOutOfRange) {
  const auto refuses = [](const char* text, const char* message) {
    expect_usage(message, [&] { parse_length_spec(text); });
  };
  refuses("count=0", "count=0: must be from 1 to 16777216; the nearest is 1");
  refuses("count=1G", "count=1073741824: must be from 1 to 16777216; the nearest is 16777216");
  refuses("max=2G", "max=2147483648: must be from 1 to 1073741824; the nearest is 1073741824");
  refuses("max=18446744073709551615",
          "max=9223372036854775807: must be from 1 to 1073741824; the nearest is 1073741824");
  refuses("dist=log-normal,sigma=-0.5", "sigma=-0.5: must be from 0 to 10; the nearest is 0");
  refuses("dist=uniform,min=10,max=9", "min=10 is more than max=9; at most 9");
  refuses("dist=speech,seconds=50",
          "seconds=50, the median, must be from min-seconds=1 to max-seconds=40");
}

TEST(UniformBelow, HasNoBiasWhereTheRangeIsNearlyAllOf64Bits) {
  // Without drawing again, values below 2^62 would come up twice as often as the others.
  const uint64_t n = 3 * (uint64_t{1} << 62);
  RandomBits random(1);
  int low = 0;
  for (int i = 0; i < 30000; ++i) low += uniform_below(random, n) < (uint64_t{1} << 62) ? 1 : 0;
  EXPECT_NEAR(low, 10000, 410);  // 5 standard deviations
}

}  // namespace GYRE_FILE
}  // namespace gyre
