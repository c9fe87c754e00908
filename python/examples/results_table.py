import gyre

rows = gyre.read_results("results/cpu-2core/attention-schedules.json")
forward = rows[rows["pass"] == "fwd"].sort_values("time_ms")
print(forward[["schedule", "layout", "time_ms", "sent_mb_rank", "result"]].head())
