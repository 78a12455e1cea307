"""Elastic control: move, hold or repartition."""
