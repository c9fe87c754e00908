#pragma once
// Tests that every attention kernel has to pass. Rows that no rectangle covers, and gaps between
// rows, are NaN and must stay unchanged.

#include "attention_kernel_test.hpp"

namespace gyre::test::attention_kernel {

// Two keys with scores 0 and ln 3, values 0 and 4: weights 1/4 and 3/4, out =
// 3, LSE = ln 4. With dO = 2: delta = 6, ds = 1/4 (0 - 6) and 3/4 (8 - 6), dq =
// ds_1 k_1, dv = 2/4 and 6/4.
TEST_P(AttentionKernel, AnExampleByHand) {
  Problem p({1, 1, 1, 1, 0, 1}, 1, 2, {full(0, 1, 0, 2)});
  const auto ln_3 = static_cast<float>(std::log(3.0));
  p.q.set(0, 0, 1);
  p.kv.set(0, 0, 0), p.kv.set(1, 0, ln_3);
  p.kv.set(0, 1, 0), p.kv.set(1, 1, 4);
  p.d_out.set(0, 0, 2);
  const double tolerance = attention_tolerance(1, 2, 1);
  with_reference([&] {
    const Forward got = forward(p);
    EXPECT_NEAR(got.out(0, 0), 3, 3 * tolerance);
    EXPECT_NEAR(got.lse(0, 0), std::log(4.0), tolerance);
    const Backward g = backward(p, got);
    EXPECT_NEAR(g.d_q(0, 0), 1.5 * std::log(3.0), 6 * tolerance);
    EXPECT_NEAR(g.d_kv(0, 0), -1.5, 6 * tolerance);
    EXPECT_NEAR(g.d_kv(1, 0), 1.5, 6 * tolerance);
    EXPECT_NEAR(g.d_kv(0, 1), 0.5, 2 * tolerance);
    EXPECT_NEAR(g.d_kv(1, 1), 1.5, 2 * tolerance);
  });
}

TEST_P(AttentionKernel, HeadDimensions) {
  const int64_t rows = on_host() ? 150 : 70, keys = on_host() ? 150 : 90;
  for (const int64_t dim : {1, 4, 5, 8, 13, 16, 24, 32, 40, 64, 80, 96, 128, 256})
    for (const Types types : {all_f32, all_bf16}) {
      if (!on_host() && (dim == 4 || dim == 8 || dim == 13 || dim == 24 || dim == 32)) continue;
      SCOPED_TRACE(testing::Message() << dim << ' ' << name_of(types.inputs));
      check(Problem(heads_of(2, 1, dim), rows, keys, {causal(0, rows, 0, keys, keys - rows)}, types,
                    on_host() ? 5 : 8));
    }
}

TEST_P(AttentionKernel, ValuesOfAnotherWidth) {
  for (const auto& [dim, v_dim] :
       {std::pair{16, 48}, {48, 16}, {192, 128}, {64, 80}, {16, 13}, {13, 24}, {5, 256}})
    for (const int64_t rows : pick<int64_t>({7, 20, 150}, {70}))  // the host has a method for each
      for (const Types types : {all_f32, all_bf16}) {
        if (!on_host() && (dim == 13 || v_dim == 13) && types.inputs == DType::f32) continue;
        SCOPED_TRACE(testing::Message() << dim << ", values " << v_dim << ", " << rows << " rows, "
                                        << name_of(types.inputs));
        check(
            Problem(heads_of(2, 1, dim, v_dim), rows, rows, {causal(0, rows, 0, rows, 0)}, types));
      }
}

TEST_P(AttentionKernel, RowsThatAreNotAligned) {
  for (const Types types : {all_f32, all_bf16})
    check(Problem(heads_of(2, 1, 32), 40, 40, {causal(0, 40, 0, 40, 0)}, types, 3));
}

TEST_P(AttentionKernel, GroupedQueriesAndPartsOfGroups) {
  const std::vector<Rectangle> r{causal(0, 70, 0, 70, 0)};
  const Types types = on_host() ? all_f32 : bf16_in;
  for (const auto& [heads, kv_heads] :
       pick<std::pair<int, int>>({{4, 4}, {4, 2}, {4, 1}, {6, 2}, {5, 1}, {7, 1}, {96, 1}},
                                 {{4, 4}, {4, 2}, {4, 1}, {5, 1}})) {
    SCOPED_TRACE(testing::Message() << heads << " heads over " << kv_heads);
    check(Problem(heads_of(heads, kv_heads, 16), 70, 70, r, types));
  }
  // Heads 2 to 7 of groups of 4: the last two of the first KV head, all of the
  // second.
  check(Problem({6, 2, 16, 4, 2, 0.25F}, 70, 70, r));
  check(Problem({5, 3, 16, 3, 2, 0.25F}, 70, 70, r, types));
  check(Problem({1, 1, 16, 8, 7, 0.25F}, 70, 70, r));
}

TEST_P(AttentionKernel, PartOfAGroupIsItsHeads) {
  const BlockHeads whole = heads_of(8, 2, 8);
  const Problem p(whole, 40, 40, {causal(0, 40, 0, 40, 0)});
  Problem part({3, 2, 8, 4, 2, whole.scale}, 40, 40,
               p.rectangles);  // heads 2, 3 and 4
  part.kv = p.kv;
  for (int64_t r = 0; r < 40; ++r)
    for (int64_t c = 0; c < 24; ++c) part.q.set(r, c, p.q(r, 16 + c));
  with_reference([&] {
    const Forward all = forward(p), some = forward(part);
    for (int64_t r = 0; r < 40; ++r)
      for (int64_t c = 0; c < 24; ++c)
        EXPECT_NEAR(some.out(r, c), all.out(r, 16 + c), attention_tolerance(8, 40, 1));
  });
}

TEST_P(AttentionKernel, RaggedSizes) {
  for (const int64_t rows : pick<int64_t>({1, 2, 15, 16, 17, 63, 64, 65, 129}, {1, 17, 64, 65}))
    for (const int64_t keys : pick<int64_t>({1, 3, 16, 31, 64, 65, 130, 300}, {1, 31, 64, 130})) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << keys << " keys");
      const Types types = on_host() ? all_f32 : bf16_in;
      check(Problem(heads_of(on_host() ? 2 : 1, 1, on_host() ? 24 : 16), rows + 3, keys + 2,
                    {full(2, rows, 1, keys)}, types));
    }
}

TEST_P(AttentionKernel, Diagonals) {
  for (const int64_t offset :
       pick<int64_t>({-200, -120, -100, -65, -64, -17, -1, 0, 1, 15, 16, 40, 63, 64, 99, 128, 300},
                     {-120, -64, -17, -1, 0, 1, 63, 64, 99, 200}))
    for (const int64_t heads : pick<int64_t>({1, 3}, {1})) {
      SCOPED_TRACE(testing::Message() << "offset " << offset << ", heads " << heads);
      check(Problem(heads_of(heads, 1, 16), 100, 140, {causal(0, 100, 0, 140, offset)},
                    on_host() ? all_f32 : bf16_in));
    }
}

TEST_P(AttentionKernel, Windows) {
  const int64_t rows = on_host() ? 150 : 130, keys = on_host() ? 330 : 200;
  for (const int64_t window :
       pick<int64_t>({1, 2, 15, 16, 17, 40, 64, 100, 400}, {1, 16, 40, 64, 100}))
    for (const int64_t offset : pick<int64_t>({-30, 0, 17, 200, 500}, {-30, 0, 150})) {
      SCOPED_TRACE(testing::Message() << "window " << window << ", offset " << offset);
      check(Problem(heads_of(on_host() ? 2 : 1, 1, 16), rows, keys,
                    {causal(0, rows, 0, keys, offset, window)}));
    }
}

TEST_P(AttentionKernel, Strides) {
  for (const auto& [q_stride, k_stride] : pick<std::pair<int, int>>(
           {{2, 1}, {1, 2}, {3, 3}, {4, 1}, {3, 7}}, {{2, 1}, {2, 2}, {1, 2}, {3, 7}}))
    for (const int64_t window : {0, 5, 90}) {
      SCOPED_TRACE(testing::Message() << q_stride << ", " << k_stride << ", window " << window);
      check(Problem(heads_of(on_host() ? 2 : 1, 1, 16), 100, 140,
                    {causal(0, 100, 0, 140, 3, window, q_stride, k_stride)},
                    on_host() ? all_f32 : bf16_in));
    }
  // Every other row, row 0 among them, lies between two keys and sees none.
  check(Problem(heads_of(1, 1, 16), 40, 40, {causal(0, 40, 0, 40, 5, 1, 1, 2)},
                on_host() ? all_f32 : bf16_in));
}

TEST_P(AttentionKernel, DocumentsNeverMeet) {
  for (const Types types : {all_f32, all_bf16})
    check(several_documents(heads_of(on_host() ? 4 : 2, on_host() ? 2 : 1, 32),
                            pick<int64_t>({5, 1, 64, 100, 2, 33, 290}, {5, 1, 64, 100, 2, 33}),
                            types));
}

TEST_P(AttentionKernel, SeveralRectanglesForTheSameRows) {
  const std::vector<Rectangle> r{full(0, 130, 0, 70), causal(0, 130, 150, 130, 0),
                                 full(50, 60, 80, 65), full(60, 1, 380, 20),
                                 causal(120, 10, 360, 20, -3)};
  for (const bool fixed : {false, true})
    for (const Types types : {all_f32, on_host() ? bf16_in : all_bf16}) {
      Problem p(heads_of(2, 1, 32), 130, 400, r, types);
      p.fixed_tiles = fixed;
      check(p);
    }
}

TEST_P(AttentionKernel, EmptyRectanglesDoNothing) {
  check(Problem(heads_of(2, 1, 8), 20, 20,
                {full(0, 10, 0, 0), full(3, 0, 0, 20), causal(5, 10, 0, 20, -50)}));
  check(Problem(heads_of(2, 1, 8), 20, 20, {}));
}

TEST_P(AttentionKernel, AgreesWithTheReferenceForwardAndBackward) {
  for (int i = 0; i < (on_host() ? 100 : 25); ++i) {
    SCOPED_TRACE(i);
    check(random_problem(draw_, !on_host()));
  }
}

TEST_P(AttentionKernel, CallsForPartsOfTheKeysAreOne) {
  for (const Types types : {all_f32, bf16_in, all_bf16}) {
    Problem p(heads_of(2, 1, 32), 70, 200, {full(0, 70, 0, 200)}, types);
    p.wide_inside = on_host() && types.out == DType::f32;
    check_in_parts(p);
  }
}

TEST_P(AttentionKernel, RowsWithoutAKeyStayUntouched) {
  with_reference([&] {
    for (const Types types : {all_f32, all_bf16}) {
      const Problem p(heads_of(2, 1, 32), 90, 40, {causal(10, 65, 0, 40, -25)}, types);
      Forward r = forward(p);
      for (const int64_t row : {10, 34}) {
        EXPECT_EQ(r.lse(row, 1), -infinity);
        EXPECT_EQ(r.out(row, 33), 0);
      }
      EXPECT_GT(r.lse(35, 1), -infinity);
      // Row 34 sees no key; row 76 is under no rectangle, in the warp of rows
      // that are.
      r.out.set(34, 3, 42);
      r.out.fill_row(76, 42);
      r.lse.fill_row(76, 0.5F);
      add(p, p.rectangles, r);
      EXPECT_EQ(r.out(34, 3), 42) << "a row that sees no key was written";
      EXPECT_EQ(r.out(76, 3), 42) << "a row outside was written";
      EXPECT_EQ(r.lse(76, 1), 0.5F) << "a row outside was written";
      Backward g = backward(p, r);
      g.d_q.set(34, 3, 42);
      g.d_q.fill_row(76, 42);
      add(p, p.rectangles, r, g);
      EXPECT_EQ(g.d_q(34, 3), 42) << "a row that sees no key was written";
      EXPECT_EQ(g.d_q(76, 3), 42) << "a row outside was written";
    }
  });
}

TEST_P(AttentionKernel, RowsThatSawNothingHaveNoGradientWhateverTheyHold) {
  const auto check_gradients = [&](const Types& types, bool fixed) {
    Problem p(heads_of(2, 1, 16), 100, 100, {causal(0, 100, 0, 100, -10)}, types);
    p.fixed_tiles = fixed;
    for (int64_t r = 0; r < 10; ++r) p.q.fill_row(r, nan_value), p.d_out.fill_row(r, nan_value);
    Forward of = forward(p);
    of.lse.fill_row(50,
                    -infinity);  // also if the mask would let it see something
    p.q.fill_row(50, nan_value);
    p.d_out.fill_row(50, nan_value);
    const Backward g = backward(p, of);
    for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(5, c), 0) << c;
    for (int64_t c = 0; c < 32; ++c) EXPECT_EQ(g.d_q(50, c), 0) << c;
    for (int64_t j = 0; j < 90; ++j) EXPECT_FALSE(std::isnan(g.d_kv(j, 0))) << j;
    for (int64_t j = 0; j < 90; ++j) EXPECT_NE(g.d_kv(j, 20), 0) << j;
    EXPECT_EQ(g.d_kv(95, 0), 0) << "a key that nobody sees";
  };
  with_reference([&] {
    for (const Types types : {all_f32, on_host() ? bf16_in : all_bf16})
      for (const bool fixed : {false, true}) check_gradients(types, fixed);
  });
}

TEST_P(AttentionKernel, UnwantedGradientsDoNotChangeTheOthers) {
  const Problem p(heads_of(4, 2, 32), 100, 120, {full(0, 100, 0, 20), causal(0, 100, 20, 100, 0)},
                  bf16_in);
  for (const int threads : pick<int>({1, 2}, {1})) {
    if (on_host()) use(make_cpu_kernel(threads));
    const Forward of = forward(p);
    const Backward both = backward(p, of), none = p.no_gradients();
    const Backward queries = backward(p, of, {true, false}), keys = backward(p, of, {false, true});
    EXPECT_TRUE(queries.d_q == both.d_q && queries.d_kv == none.d_kv);
    EXPECT_TRUE(keys.d_kv == both.d_kv && keys.d_q == none.d_q);
    EXPECT_FALSE(both.d_q == none.d_q || both.d_kv == none.d_kv);
  }
}

TEST_P(AttentionKernel, RepeatsBitForBit) {
  for (const Types types : {all_f32, all_bf16}) {
    const Problem p(heads_of(4, 2, 80), 100, 100, {causal(0, 100, 0, 100, 0)}, types);
    const Forward first = forward(p), second = forward(p);
    const Backward gradients = backward(p, first);
    EXPECT_TRUE(first == second);
    EXPECT_TRUE(gradients == backward(p, first));
    use(make_kernel(stream()));
    EXPECT_TRUE(first == forward(p));
    EXPECT_TRUE(gradients == backward(p, first));
  }
}

TEST_P(AttentionKernel, FixedTilesGiveTheSameBitsHoweverQueriesAreDealt) {
  for (const Problem& p : fixed_problems()) {
    const Rectangle& r = p.rectangles[0];
    Forward whole = forward(p), parts = p.cleared();
    const int rounds = on_host() ? 3 : 2;
    for (int round = 1; round < rounds; ++round) add(p, p.rectangles, whole);  // merged unevenly
    const Backward gradients = backward(p, whole);
    Backward part_gradients = p.no_gradients();
    for (int round = 0; round < rounds; ++round) {
      const std::vector<int64_t> cuts = random_cuts(r.q_length, draw_);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        Rectangle part = r;
        part.q_begin += cuts[i];
        part.q_length = cuts[i + 1] - cuts[i];
        part.mask.offset += r.mask.full() ? 0 : cuts[i] * r.mask.q_stride;
        add(p, {&part, 1}, parts);
        if (round == 0) add(p, {&part, 1}, whole, part_gradients, {true, false});
      }
    }
    EXPECT_TRUE(parts == whole);
    EXPECT_TRUE(part_gradients.d_q == gradients.d_q);
  }
}

TEST_P(AttentionKernel, FixedTilesGiveTheSameBitsHoweverKeysAreDealt) {
  for (const Problem& p : fixed_problems()) {
    const Rectangle& r = p.rectangles[0];
    const Forward of = forward(p);
    const Backward whole = backward(p, of);
    Backward parts = p.no_gradients();
    const std::vector<int64_t> cuts = random_cuts(r.k_length, draw_);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      Rectangle part = r;
      part.k_begin += cuts[i];
      part.k_length = cuts[i + 1] - cuts[i];
      part.mask.offset -= r.mask.full() ? 0 : cuts[i] * r.mask.k_stride;
      add(p, {&part, 1}, of, parts, {false, true});
    }
    EXPECT_TRUE(parts.d_kv == whole.d_kv);
  }
}

TEST_P(AttentionKernel, LargeOffsets) {
  Problem p(heads_of(2, 1, 32), 70, 120, {causal(0, 70, 0, 120, 50)});
  // Scores around 1e4: one dimension of the queries times one of the keys.
  for (int64_t r = 0; r < 120; ++r) p.kv.set(r, 0, 100);
  for (int64_t r = 0; r < 70; ++r)
    for (int64_t h = 0; h < 2; ++h) p.q.set(r, h * 32, 100 / p.heads.scale);
  p.magnified = 1e4;
  p.gradient_term = 100;
  check(p);
}

TEST_P(AttentionKernel, ScoresThatKeepGrowing) {
  // Every block of keys exceeds the maximum of the ones before, or falls far
  // below it, or either.
  const int64_t rows = on_host() ? 70 : 40, keys = on_host() ? 300 : 200;
  for (const int sign : pick<int>({1, -1, 0}, {0})) {
    Problem p(heads_of(1, 1, 8), rows, keys, {full(0, rows, 0, keys)});
    for (int64_t r = 0; r < keys; ++r) p.kv.set(r, 3, static_cast<float>(2 * r));
    for (int64_t r = 0; r < rows; ++r)
      p.q.set(r, 3, static_cast<float>(sign != 0 ? sign : r % 2 == 0 ? 1 : -1));
    p.magnified = 0.7 * static_cast<double>(keys);
    p.gradient_term = 2 * static_cast<double>(keys);
    check(p);
  }
}

TEST_P(AttentionKernel, NotANumberInAVisibleRowShows) {
  const auto check_nans = [&](const Types& types, bool fixed) {
    Problem p(heads_of(1, 1, 8), 40, 40, {causal(0, 20, 0, 20, 0), causal(20, 20, 20, 20, 0)},
              types);
    p.fixed_tiles = fixed;
    p.q.set(7, 2, nan_value);
    p.kv.set(30, 8 + 5, nan_value);  // a value
    p.kv.set(35, 1, nan_value);      // a key
    const Forward r = forward(p);
    EXPECT_TRUE(std::isnan(r.lse(7, 0)) && std::isnan(r.out(7, 0)));
    EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.out(6, 0)));
    EXPECT_TRUE(std::isnan(r.out(30, 5)));
    EXPECT_FALSE(std::isnan(r.lse(34, 0)));
    EXPECT_TRUE(std::isnan(r.lse(35, 0)) && std::isnan(r.lse(39, 0)));
    const Backward g = backward(p, r);
    EXPECT_TRUE(std::isnan(g.d_q(7, 0)) && std::isnan(g.d_kv(3, 0)) && std::isnan(g.d_kv(3, 8)));
    EXPECT_FALSE(on_host() && std::isnan(g.d_q(6, 0)));  // a GPU multiplies tiles
    EXPECT_TRUE(std::isnan(g.d_q(39, 0)) && std::isnan(g.d_kv(38, 0)));
  };
  on_every_target([&] {
    for (const Types types : {all_f32, on_host() ? bf16_in : all_bf16})
      for (const bool fixed : {false, true}) check_nans(types, fixed);
  });
}

TEST_P(AttentionKernel, InfiniteScoresShowAndStayInTheirRow) {
  on_every_target([&] {
    Problem p(heads_of(1, 1, 8), 20, 20, {causal(0, 20, 0, 20, 0)});
    p.q.set(7, 2, infinity);
    const Forward r = forward(p);
    EXPECT_TRUE(std::isnan(r.lse(7, 0)));
    EXPECT_FALSE(std::isnan(r.lse(6, 0)) || std::isnan(r.lse(8, 0)));
    (void)backward(p, r);
  });
}

}  // namespace gyre::test::attention_kernel
