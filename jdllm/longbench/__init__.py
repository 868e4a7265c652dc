"""LongBench and InfiniteBench: their files read, asked and scored as published."""
