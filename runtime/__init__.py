"""Parts that every process needs: settings, tasks, addresses, bus, connections, telemetry, proxy."""
