"""Plain data of devices and models: shapes, supported features, memory and step times."""
