"""Tests of the doctor: a fault is planted for every check, and found."""
