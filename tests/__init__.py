"""Tests of Penstock, and what they share."""
