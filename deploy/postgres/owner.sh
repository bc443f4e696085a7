#!/bin/sh
# Makes the database and its owner, which is no superuser, when the container of PostgreSQL starts for the first time.
set -eu
psql --no-psqlrc --set ON_ERROR_STOP=1 --set password="$DATABASE_PASSWORD" --username "$POSTGRES_USER" --dbname postgres <<'SQL'
create role penstock login password :'password';
create database penstock owner penstock;
revoke all on database penstock from public;
SQL
