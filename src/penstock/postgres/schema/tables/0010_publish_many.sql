-- publish_many takes what publish takes for each message: functions whose parameters or results change are made anew.

drop function if exists penstock.publish_many(text, jsonb[], uuid[]);
drop function if exists penstock.insert_many_copies(text, jsonb[], uuid[], bigint[], bigint, timestamptz);
