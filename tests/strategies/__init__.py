"""Tests of the strategies under the Trainer: functions that fit in the workers of the pool, and what they saw."""
