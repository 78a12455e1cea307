"""Devices, model shapes and step times: plain data for the planner and the simulator."""
