"""PostgreSQL: connections, notifications, migrations, the embedded server. It knows no capability."""
