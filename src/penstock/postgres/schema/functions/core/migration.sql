-- What a migration (postgres/migrate.py) does beside applying files: it drops what the files no longer declare, and notes
-- what it did.

create or replace function penstock.record_migration(p_name text, p_checksum text, p_version text)
returns void
language sql
as $$
    insert into penstock.migrations (name, checksum, version)
    values (p_name, p_checksum, p_version)
    on conflict (name) do update
    set checksum = excluded.checksum, version = excluded.version, applied_at = now()
$$;
comment on function penstock.record_migration(text, text, text) is 'Part of a migration: notes a file as applied.';

create or replace function penstock.record_protocol(p_number integer, p_oldest integer, p_version text)
returns void
language sql
as $$
    insert into penstock.protocol as stored (number, oldest, version)
    values (p_number, p_oldest, p_version)
    on conflict (is_row) do update
    set number = excluded.number, oldest = excluded.oldest, version = excluded.version, changed_at = now()
$$;
comment on function penstock.record_protocol(integer, integer, text) is 'Part of a migration: notes which protocols the functions serve.';

create or replace function penstock.drop_undeclared(p_functions oid[], p_versions text[])
returns text[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    undeclared oid[];
    names text[];
    command text;
begin
    -- A function that a file declares has been created since, or replaced, and so has another row version.
    undeclared := array(
        select pg_proc.oid
        from pg_proc
        join unnest(p_functions, p_versions) as before (oid, version)
            on before.oid = pg_proc.oid and before.version = pg_proc.xmin::text
        where pg_proc.pronamespace = 'penstock'::regnamespace
            and not exists (
                select from pg_depend
                where pg_depend.classid = 'pg_proc'::regclass
                    and pg_depend.objid = pg_proc.oid
                    and pg_depend.deptype = 'e'
            )
    );
    for command in
        select format('drop trigger %I on %s', tgname, tgrelid::regclass)
        from pg_trigger
        join pg_class on pg_class.oid = tgrelid
        where tgfoid = any (undeclared)
            and tgparentid = 0
            and relnamespace = 'penstock'::regnamespace
    loop
        execute command;
    end loop;
    names := array(select function::regprocedure::text from unnest(undeclared) as function order by 1);
    if names <> '{}' then
        -- In one statement, since some may depend on others.
        execute 'drop routine ' || array_to_string(names, ', ');
    end if;
    return names;
end
$$;
comment on function penstock.drop_undeclared(oid[], text[]) is
    'Part of a migration: drops the functions of the schema that have the same row version (xmin) as before the files were applied, with their triggers on tables of the schema. Members of extensions stay. Returns what was dropped.';
