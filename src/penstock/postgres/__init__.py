"""The only room that speaks SQL: the schema, the connection, and one typed function for each SQL function."""
