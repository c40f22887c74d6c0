"""Benchmarks of gemproj for airspeed velocity."""
